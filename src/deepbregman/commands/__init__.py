"""One file for each verb: a public function that Python calls and the command line is made from."""
