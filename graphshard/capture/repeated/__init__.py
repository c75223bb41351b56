"""Ranges of a captured graph that repeat: traced by AOTAutograd once, and put back as often.

`find` finds them in the graph that Dynamo hands over, `trace` makes the joint graph of one of them
and puts a single call in the place of each, `expand` puts the ops back into the joint graph. What
comes out is what AOTAutograd would have made of the whole graph, in a fraction of the time.
"""
