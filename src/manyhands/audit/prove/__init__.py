"""``--prove``: run a program again with its findings cured, compare the results, and measure the gain.

After the audit the program is run a few more times, each time in a process of its own and only for some steps: as it
is, and cured. In both kinds of run the lines that were found are rewritten (:mod:`.rewrite`) to call a
:class:`.second_pass.SecondPass`. As it is, that does what the line says and keeps the values that were read. Cured, a
read gives a :class:`.deferred.Deferred` instead, which is read when the steps are over. A value that is needed earlier,
in an ``if`` for example, is read at that moment: so the cured program computes the same, and what is used for control
flow is found and reported. :mod:`.plan` says which findings can be cured so, :mod:`.compare` runs it all.
"""
