"""The commands of the command line, a file each. None imports torch before it is called."""
