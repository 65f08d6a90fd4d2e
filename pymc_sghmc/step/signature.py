"""Shows the shared arguments in the signature and the documentation of a sampler's class."""

import inspect
import re

from typing import Any

from pymc_sghmc.step.arguments import TYPES, SharedArguments

__all__ = ["show_shared_arguments"]

# The section of parameters in a docstring, up to the next section.
PARAMETERS = re.compile(
    r"^Parameters\n-+\n.*?(?=\n\n\S[^\n]*\n---|\s*\Z)", re.DOTALL | re.MULTILINE
)


def show_shared_arguments(cls: Any) -> None:
    """Put the shared arguments into signature and docstring of a class that takes ``**shared``."""
    if "__init__" not in vars(cls):
        return  # the signature that it inherits is right
    signature = inspect.signature(cls.__init__)
    parameters = list(signature.parameters.values())
    takes_shared = parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    if takes_shared:
        parameters[-1:] = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=argument.default, annotation=hint
            )
            for name, (hint, argument) in TYPES.items()
        ]
        cls.__init__.__signature__ = signature.replace(parameters=parameters)
    cls.__signature__ = signature.replace(parameters=parameters[1:])
    if takes_shared and cls.__doc__:  # python -OO has none
        text = (inspect.getdoc(SharedArguments) or "").partition("Parameters\n----------\n")[2]
        docstring = inspect.cleandoc(cls.__doc__)
        cls.__doc__ = PARAMETERS.sub(lambda match: f"{match[0]}\n{text}", docstring, count=1)
