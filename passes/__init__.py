"""The pipeline: which passes run, in which order, on which form of the program.

Every pass is one module with one function `Program -> Program` that edits the program's graphs
in place and returns it; its docstring says what holds before and after.
"""

if __name__ != "graphshard.passes":
    raise ImportError("import graphshard.passes, not the top-level folder")

from graphshard.passes.drop_detached import drop_detached
from graphshard.passes.drop_duplicates import drop_duplicates
from graphshard.passes.fold_casts import fold_casts
from graphshard.passes.insert_gathers import insert_gathers
from graphshard.passes.insert_reductions import insert_reductions
from graphshard.passes.insert_releases import insert_releases
from graphshard.passes.pin_meshes import pin_meshes
from graphshard.passes.release_checkpoints import release_checkpoints
from graphshard.passes.sink_views import sink_views
from graphshard.passes.sum_gradients import sum_gradients
from graphshard.passes.tag_recompute import tag_recompute

# On the graph as captured: the joint graph, or the forward graph under no_grad.
CAPTURED = (drop_detached, pin_meshes, drop_duplicates, sum_gradients, fold_casts, tag_recompute)
# On the same, where the planner decides what the user's checkpoints left open.
RELEASED = (release_checkpoints,)
# On the forward and the backward graph.
PLACEMENT = (sink_views, insert_gathers, insert_releases, insert_reductions)
