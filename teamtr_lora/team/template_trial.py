"""Renders a stranger's chat template, in this process of its own, within bounds of time and memory. Run as a program.

The environment is the sandboxed one of transformers, with nothing of ours imported: JSON comes in, and a list of texts goes out,
with null and the reason where the template refuses a conversation (one that takes no system turn, for instance).
"""

import datetime
import json
import resource
import sys

SECONDS, BYTES = 5, 1 << 30
MOST_CHARACTERS = 1 << 20  # of a conversation of a few words
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

    def tojson(value, ensure_ascii=False, **look):  # type: ignore[no-untyped-def]
        return json.dumps(value, ensure_ascii=ensure_ascii, **look)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    day = datetime.date.fromisoformat(given["day"])
    environment.globals |= {"raise_exception": refuse, "strftime_now": day.strftime}
    names = given["names"] | {"date_string": day.strftime("%d %b %Y"), "tools": None, "documents": None}
    found = []
    for turns, opened in given["conversations"]:
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text = environment.from_string(given["template"]).render(messages=messages, add_generation_prompt=opened, **names)
            text.encode()  # half of a surrogate pair, which no tokenizer takes, is an error of the template's
        except MemoryError:
            return TOO_LARGE
        except Exception as error:
            found.append([None, str(error)[:500]])
            continue
        if len(text) > MOST_CHARACTERS:
            return TOO_LARGE
        found.append([text, ""])
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
