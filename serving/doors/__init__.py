"""Front doors of the API onto the catalogue: each takes the parts and a principal, checks rights where it
reads, and answers with the object that the API shows."""
