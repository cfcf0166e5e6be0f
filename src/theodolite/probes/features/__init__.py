"""What a network has learned: Fourier features of its weights, and how far its classes have collapsed."""
