"""From a `fully_shard`ed model to a graph with marks: what Dynamo sees instead of FSDP2's hooks."""
