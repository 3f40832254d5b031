"""``--prove``: run a program again with its findings cured, compare the results, and measure the gain.

After the audit the program runs a few more times, each time in a new process and only for some steps: plain, and cured.
In both kinds of run the lines that were found are rewritten (:mod:`.rewrite`) to call a
:class:`.second_pass.SecondPass`. In a plain run it does what the line says and keeps the values that were read. In a
cured run a read returns a :class:`.deferred.Deferred` instead, which is read when the steps are over. A value that is
needed earlier, in an ``if`` for example, is read at that moment: so the cured program computes the same, and values
that control flow needs are found and reported. :mod:`.plan` says which findings can be cured so, :mod:`.compare` runs
it all.
"""
