"""What a step costs: microseconds of compute and communication, bytes of memory.

In come sizes, flops and groups; out come microseconds and bytes. Every formula works on numbers
and on sympy symbols alike. Trust falls from what was measured in this job over what
`graphshard calibrate` measured on this machine to presets. Those that measure or read graphs import
torch (calibrate, fit, flops, live, measure, sizes); the others never do.
"""
