"""What does the placement of norms do to the stream?"""
