"""For tests that cross a network: hosts in namespaces of one machine, and a cloud made of them."""
