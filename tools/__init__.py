"""What only developers of Outrider run: recipes, simulations, the documentation site."""
