"""`graphshard doctor`: runs a training script with eager FSDP2 and with graphshard, and compares.

launch starts the command, attach and watch record in each rank what happens (`facts`), lints and
verdict turn what was recorded into findings, environment looks at what is installed. Where numbers
differ, whole compiles the model with `aot_eager` in a further run, and blame says whose that is.
"""
