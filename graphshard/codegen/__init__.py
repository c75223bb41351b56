"""A scheduled graph becomes callables: op by op, or in regions that Inductor compiles."""
