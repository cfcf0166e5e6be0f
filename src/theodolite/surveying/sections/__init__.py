"""The sections of a survey, one file each. A new one is a new file here that holds a `section`."""
