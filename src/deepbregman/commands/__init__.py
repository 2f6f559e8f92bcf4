"""One file for each command: a public function, from which the command line is made."""
