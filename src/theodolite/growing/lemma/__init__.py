"""The constants of Lemma 1 on depth expansion, and what its theorems make of them; `theory` has them all."""
