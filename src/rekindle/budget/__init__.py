"""The budget: profile a model's blocks, choose the fate of every activation, and make it fit.

`profile` measures, `menu` finds the options worth having, `solve` chooses one for each block,
`plan` is the choice as a value, `execute` applies it to a model, `fit` does all of it.
"""
