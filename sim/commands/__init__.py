"""Commands that are more than a few lines, one file each. They may import everything but the command itself."""
