"""Renders a stranger's chat template once, in this process of its own, within bounds of time and memory. Run as a program.

It only finds templates that loop or explode: what comes out is thrown away, and any other mistake in the template shows when the
tokenizer renders it. The environment is the sandboxed one of transformers, with nothing of ours imported.
"""

import json
import resource
import sys

SECONDS, BYTES = 5, 1 << 30
TOO_LARGE = 3  # exit status


def main() -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    given = json.load(sys.stdin)
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag by which transformers marks what an assistant says."""

        tags = {"generation"}

        def parse(self, parser):  # type: ignore[no-untyped-def]
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def refuse(message):  # type: ignore[no-untyped-def]
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, default=str)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: form}
    for turns in given["conversations"]:
        for opened in (True, False):
            try:
                template = environment.from_string(given["template"])
                template.render(messages=turns, add_generation_prompt=opened, tools=None, documents=None, **given["names"])
            except MemoryError:
                return TOO_LARGE
            except Exception:  # noqa: S112  (a template that takes no system turn, and the like: its tokenizer will say so)
                continue
    return 0


if __name__ == "__main__":
    sys.exit(main())
