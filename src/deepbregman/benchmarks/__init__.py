"""How fast a step is, against the bare encoder and against peers."""
