"""What a block would do that is not there yet."""
