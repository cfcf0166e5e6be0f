"""How results are shown: text, tables, figures, pages, and the methods that all results share."""
