"""What everybody uses: sizes, errors, building and calling models, arguments, batches, files, progress."""
