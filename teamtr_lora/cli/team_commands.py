"""eval, ask, certify, serve: what takes a trained team."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from teamtr_lora.cli.arguments import port, positive, print_json, share, temperature


def add_commands(command: Any) -> None:
    evaluate = command("eval", _eval, "Measure a team on held-out items: avg@k, pass@k, agents, coordination.")
    evaluate.add_argument("team", type=Path, metavar="RUN_OR_TEAM", help="the run directory that train printed")
    evaluate.add_argument("--split", choices=["train", "test"], default="test", help="which items (default: test)")
    evaluate.add_argument("--k", type=positive, metavar="K", help="samples per item (default: the recipe's)")
    evaluate.add_argument("--temperature", type=temperature, metavar="T", help="0 is greedy (default: the recipe's)")
    evaluate.add_argument("--limit", type=positive, metavar="N", help="items (default: the recipe's)")
    evaluate.add_argument("--engine", choices=["transformers", "vllm"], help="what samples (default: the recipe's)")
    evaluate.add_argument("--json", action="store_true", help="print the same fields as JSON")

    ask = command("ask", _ask, "Play one episode with your own question and print the transcript.")
    ask.add_argument("team", type=Path, metavar="RUN_OR_TEAM", help="the run directory that train printed")
    ask.add_argument("question", help="what to ask the team")
    ask.add_argument("--temperature", type=temperature, default=None, metavar="T", help="0 is greedy (default: the recipe's)")
    ask.add_argument("--seed", type=int, default=0, help="another seed, another answer (default: 0)")
    ask.add_argument("--json", action="store_true", help="print the transcript as JSON")

    certify = command("certify", _certify, "What the trust region certifies about each stage of a run, beside what was measured.")
    certify.add_argument("team", type=Path, metavar="RUN", help="the run directory that train printed")
    certify.add_argument("--json", action="store_true", help="print every term as JSON")

    serve = command("serve", _serve, "Serve a team by vLLM's OpenAI API: the base and every agent, each a model by its name.")
    serve.add_argument(
        "team",
        type=Path,
        metavar="RUN_OR_TEAM",
        help="the run directory that train printed (with --accept-adapters a recipe will do)",
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine only)")
    serve.add_argument("--port", type=port, default=8000, help="port to listen at (default: 8000)")
    serve.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    serve.add_argument("--memory-share", type=share, default=0.9, metavar="S", help="share of the GPU's memory (default: 0.9)")
    serve.add_argument(
        "--accept-adapters", action="store_true", help="let training runs with rollout.engine=vllm_server put adapters here"
    )
    serve.add_argument("--api-key-variable", metavar="NAME", help="environment variable that holds the API key to ask for")


def _eval(args: argparse.Namespace) -> None:
    from teamtr_lora.evaluation.commands import evaluate_team
    from teamtr_lora.report.summary import print_evaluation, progress_bar

    with progress_bar("evaluating") as progress:
        evaluation = evaluate_team(
            args.team,
            split=args.split,
            k=args.k,
            temperature=args.temperature,
            limit=args.limit,
            engine=args.engine,
            progress=progress,
        )
    if args.json:
        print_json(evaluation.as_dict())
        return
    print_evaluation(evaluation)


def _ask(args: argparse.Namespace) -> None:
    from teamtr_lora.evaluation.commands import ask_team
    from teamtr_lora.report.summary import print_transcript

    episode = ask_team(args.team, args.question, temperature=args.temperature, seed=args.seed)
    if args.json:
        from teamtr_lora.rollout.records import episode_record

        print_json(episode_record(episode))
        return
    print_transcript(episode)


def _certify(args: argparse.Namespace) -> None:
    from teamtr_lora.training.certify import certify_run

    certificates = certify_run(args.team)
    if args.json:
        print_json(certificates.as_dict())
        return
    from teamtr_lora.report.certificates import print_certificates

    print_certificates(certificates)


def _serve(args: argparse.Namespace) -> None:
    from teamtr_lora.rollout.serve import ServeOptions, serve

    serve(
        args.team,
        ServeOptions(
            host=args.host,
            port=args.port,
            device=args.device,
            memory_share=args.memory_share,
            accept_adapters=args.accept_adapters,
            api_key_variable=args.api_key_variable,
        ),
    )
