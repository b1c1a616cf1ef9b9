"""What torch's distributed checkpoint does when it is called: save, load, convert, in its terms and on our engine."""
