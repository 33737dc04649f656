#!/usr/bin/env python3
"""Writes text with the newest weights of king_james.py's model, while another process trains it.

    python client/python/examples/follow.py --server localhost:7700 --run bible --steps 1000     # trains
    python client/python/examples/generate.py --server localhost:7700 --run bible                # writes
    python client/python/examples/generate.py --server localhost:7700 --run bible --page 8000    # on a web page, too

A text is written with the weights of one version, in the terminal and on the page alike, and then one with the next.
"""

import argparse
import html
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

import ballast

sys.path.insert(0, str(Path(__file__).parent))
from king_james import CONTEXT, ByteModel  # noqa: E402

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="1">
<title>{run}, step {step}</title><style>
body {{ max-width: 42rem; margin: 3rem auto; padding: 0 1rem; font: 1.1rem/1.6 Georgia, serif; color: #222; background: #fdfcf8 }}
header {{ font: .9rem system-ui, sans-serif; color: #666 }} pre {{ font: inherit; white-space: pre-wrap }}
</style></head><body><header>run {run}, step {step}, weights {age:.1f} s old</header><pre>{text}</pre></body></html>
"""


class Writing:
    """The text in hand, for the page. Thread-safe: what a request reads is replaced, not changed."""

    def __init__(self, run: str):
        self.run, self.version, self.text = run, None, ""

    def page(self) -> bytes:
        step, age = (0, 0.0) if self.version is None else (self.version.step, self.version.staleness_s)
        fields = {"run": html.escape(self.run), "step": step, "age": age, "text": html.escape(self.text)}
        return PAGE.format(**fields).encode()


def serve(writing: Writing, port: int) -> ThreadingHTTPServer:
    """A page on this machine alone."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            page = writing.page()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@torch.no_grad()
def sample(model: ByteModel, prompt: str, count: int, temperature: float, random: torch.Generator):
    """Yields `count` characters, one after another. Each stands for a byte, Latin-1."""
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(count):
        logits = model(tokens[:, -CONTEXT:])[0, -1].float()
        chances = torch.softmax(logits / temperature, 0)
        token = torch.multinomial(chances, 1, generator=random)
        tokens = torch.cat([tokens, token[None]], 1)
        yield chr(token.item())


def printable(character: str) -> str:
    return character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}"


def write_text(options, model, follower, writing, random) -> None:
    with follower.held() as version:
        writing.version, writing.text = version, options.prompt
        print(f"\n--- step {version.step}, {version.staleness_s:.1f} s old ---\n{options.prompt}", end="", flush=True)
        for character in sample(model, options.prompt, options.length, options.temperature, random):
            writing.text += character
            print(printable(character), end="", flush=True)
    print(flush=True)


def generate(options) -> None:
    model, random, writing = ByteModel(), torch.Generator().manual_seed(options.seed), Writing(options.run)
    with ballast.follow(model, server=options.server, run=options.run) as follower:
        follower.wait()
        if options.page is not None:
            print(f"http://127.0.0.1:{serve(writing, options.page).server_port}/", flush=True)
        seen, written = None, 0
        while options.texts == 0 or written < options.texts:
            while (follower.step, follower.generation) == seen:
                follower.wait(timeout=1, step=follower.step + 1)
            write_text(options, model, follower, writing, random)
            seen, written = (writing.version.step, writing.version.generation), written + 1


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="the daemon's address (default: $BALLAST_SERVER, else localhost:7700)")
    parser.add_argument("--run", required=True, help="the run's name on the daemon")
    parser.add_argument("--page", type=int, metavar="PORT", help="show the text on this machine's port; 0: any")
    parser.add_argument("--texts", type=int, default=0, help="end after so many; 0: never (the default)")
    parser.add_argument("--length", type=int, default=400, help="characters of a text")
    parser.add_argument("--prompt", default="And it came to pass", help="what each text begins with")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.temperature <= 0 or options.length < 1 or not options.prompt or options.texts < 0:
        parser.error("--temperature must be above 0, --length at least 1, --texts at least 0, and --prompt not empty")
    if not options.prompt.isascii():
        parser.error(f"--prompt {options.prompt!r}: the model knows the letters of ASCII alone")
    return options


def main():
    options = parse_options()
    torch.set_num_threads(1)
    try:
        generate(options)
    except ballast.BallastError as error:
        sys.exit(f"generate.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
