"""What a user did that cannot work, said in one line that names the fix."""


class UserError(ValueError):
    """Bad input: a recipe, a file, a model or an argument. The message says what to change."""
