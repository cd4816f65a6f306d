"""Answers under JSON schemas: plain decoding under the grammar, look-up drafts, and look-up drafts
with the tokens that the grammar forces. A real model, 100 schemas of our own.

The schemas are of the kinds that JsonSchemaBench (Geng et al. 2501.10868) collects: flat records,
nested ones, lists of records, and calls of functions. Each schema is asked for once per setting, in
turn; ratios are of whole calls, prompt included. Greedy texts must be the plain ones.

    python benchmarks/structured.py                    four minutes; needs ../shared
    python benchmarks/structured.py --count 8 --quick  nothing stored
    python benchmarks/structured.py --render benchmarks/results/structured-DATE.json
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.table import Table
from workload import SHARED, OtherCpu, console, read_result, write_result

MODEL = SHARED / "models" / "smollm2-135m-instruct"
NAME = "structured"
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "none"},
    "suffix": {"drafter": "suffix", "num_draft_tokens": 8},
    "suffix + forced": {"drafter": "suffix", "num_draft_tokens": 8},
    "ngram": {"drafter": "ngram", "num_draft_tokens": 8},
    "ngram + forced": {"drafter": "ngram", "num_draft_tokens": 8},
    "auto + forced": {"drafter": "ngram", "num_draft_tokens": "auto:8"},
}
KINDS = ("record", "nested", "list", "call")
STRING = {"type": "string", "minLength": 1, "maxLength": 24}
WHOLE = {"type": "integer", "minimum": 0, "maximum": 9999}
SWITCH = {"type": "boolean"}
# what is asked for, and fields: a name for text, `#` for a number, `?` for yes or no, `|` for a choice
THINGS = {
    "a person": "first_name last_name age# email_address is_employed?",
    "a weather report": "city temperature_celsius# condition=sunny|cloudy|rainy|snowing humidity_percent#",
    "a book": "title author_name year_of_publication# language is_available?",
    "a flight": "departure_airport arrival_airport number_of_passengers# cabin=economy|business|first",
    "a hotel booking": "hotel_name check_in_date number_of_nights# room_type=single|double|suite",
    "a film": "title director release_year# genre=comedy|drama|thriller|documentary rating#",
    "an order": "order_number# customer_name total_amount# status=pending|shipped|delivered",
    "a server": "hostname cpu_cores# memory_gigabytes# operating_system is_running?",
    "a recipe": "recipe_name preparation_minutes# difficulty=easy|medium|hard main_ingredient",
    "a bank transfer": "sender_account receiver_account amount_in_cents# currency=EUR|USD|GBP",
    "a calendar event": "event_title start_time duration_minutes# location is_recurring?",
    "a support ticket": "ticket_id# subject priority=low|normal|high|urgent assigned_to",
    "a car": "manufacturer model_name year# fuel=petrol|diesel|electric|hybrid mileage#",
    "a song": "song_title artist_name duration_seconds# album_name is_explicit?",
    "a university course": "course_code course_name credit_points# semester=winter|summer",
    "a medicine": "medicine_name dose_milligrams# times_per_day# requires_prescription?",
    "a football match": "home_team away_team home_goals# away_goals# stadium_name",
    "a house": "street_address number_of_rooms# living_area_square_metres# has_garden?",
    "a job advertisement": "job_title company_name salary_per_year# contract=permanent|temporary",
    "a sensor reading": "sensor_identifier measured_value# unit=celsius|percent|pascal is_valid?",
    "a software package": "package_name latest_version license_name number_of_downloads#",
    "a train connection": "departure_station arrival_station departure_platform# is_delayed?",
    "a container": "image_name container_port# restart_policy=Always|OnFailure|Never replicas#",
    "a news article": "headline publication_date author_name section=politics|sports|culture",
    "a plant": "common_name scientific_name height_centimetres# watering=daily|weekly|monthly",
}


def record(fields: str) -> dict[str, Any]:
    """The schema of an object with these fields, in this order, all required."""
    properties: dict[str, Any] = {}
    for field in fields.split():
        name, _, choices = field.partition("=")
        if choices:
            properties[name] = {"enum": choices.split("|")}
        elif name.endswith("#"):
            properties[name[:-1]] = WHOLE
        elif name.endswith("?"):
            properties[name[:-1]] = SWITCH
        else:
            properties[name] = STRING
    return closed(properties)


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def schema_of(kind: str, thing: str) -> dict[str, Any]:
    """The schema of one of KINDS for one of THINGS."""
    fields = THINGS[thing]
    if kind == "record":
        return record(fields)
    if kind == "nested":
        inner = " ".join(fields.split()[1:])
        return closed({"metadata": record("identifier# source"), "details": record(inner)})
    if kind == "list":
        few = " ".join(fields.split()[:3])
        return {"type": "array", "items": record(few), "minItems": 3, "maxItems": 3}
    function = "create_" + thing.split(maxsplit=1)[1].replace(" ", "_")
    return closed({"name": {"const": function}, "arguments": record(fields)})


def cases(count: int) -> list[tuple[str, str, dict[str, Any]]]:
    """(kind, prompt, schema) of each schema; kinds take turns."""
    every = [
        (kind, f"Make up {thing} and answer as JSON.", schema_of(kind, thing))
        for thing in THINGS
        for kind in KINDS
    ]
    return every[:count]


def measure(model: Path, count: int, threads: int, tokens: int) -> list[dict[str, Any]]:
    """One entry a schema and setting: seconds, tokens, steps, what was drafted, and the text."""
    from outrider.llm import LLM
    from outrider.sampling.params import SamplingParams
    from outrider.sampling.structured import StructuredOutputsParams

    engines = {
        name: LLM(str(model), threads=threads, **options) for name, options in SETTINGS.items()
    }
    for name, llm in engines.items():
        if "forced" not in name:
            llm._decoder.max_forced = 0
    process = psutil.Process()
    results = []
    for number, (kind, prompt, schema) in enumerate(cases(count)):
        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        names = list(engines) if number % 2 else list(engines)[::-1]
        for name in names:
            other = OtherCpu(process)
            began = time.perf_counter()
            answer = engines[name].chat([{"role": "user", "content": prompt}], params)[0]
            seconds = time.perf_counter() - began
            results.append(
                {
                    "schema": number,
                    "kind": kind,
                    "setting": name,
                    "seconds": seconds,
                    "tokens": len(answer.token_ids),
                    "steps": answer.stats.steps,
                    "drafted": answer.stats.drafted,
                    "accepted": answer.stats.accepted,
                    "others": other.share(),
                    "text": answer.text,
                }
            )
    return results


def show(result: dict[str, Any]) -> None:
    """Ratios by kind of schema: geometric means over schemas, against plain and against the same
    drafter without forced tokens."""
    runs = result["runs"]
    seconds = {(run["schema"], run["setting"]): run["seconds"] for run in runs}
    texts = {(run["schema"], run["setting"]): run["text"] for run in runs}
    numbers = sorted({run["schema"] for run in runs})
    kinds = {run["schema"]: run["kind"] for run in runs}
    table = Table("setting", "tau", "accepted", "x plain", *KINDS, "x without", "texts equal")
    for name in result["settings"]:
        mine = [run for run in runs if run["setting"] == name]
        speedups = {n: seconds[n, "plain"] / seconds[n, name] for n in numbers}
        base = name.removesuffix(" + forced")
        without = "-"
        if base != name and base in result["settings"]:
            ratios = [seconds[n, base] / seconds[n, name] for n in numbers]
            without = f"{statistics.geometric_mean(ratios):.2f}"
        drafted = sum(run["drafted"] for run in mine)
        share = sum(run["accepted"] for run in mine) / drafted if drafted else 0.0
        tau = sum(run["tokens"] for run in mine) / sum(run["steps"] for run in mine)
        by_kind = [[speedups[n] for n in numbers if kinds[n] == kind] or [1.0] for kind in KINDS]
        equal = sum(texts[n, name] == texts[n, "plain"] for n in numbers)
        table.add_row(
            name,
            f"{tau:.2f}",
            f"{share:.0%}",
            f"{statistics.geometric_mean(list(speedups.values())):.2f}",
            *(f"{statistics.geometric_mean(values):.2f}" for values in by_kind),
            without,
            f"{equal} of {len(numbers)}",
        )
    console().print(table)


def main(
    count: Annotated[int, typer.Option(help="schemas")] = 100,
    tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 160,
    threads: int = 2,
    quick: Annotated[bool, typer.Option(help="nothing stored")] = False,
    render: Annotated[Path | None, typer.Option(help="show a stored result")] = None,
) -> None:
    """Measure, store and show."""
    if render is not None:
        show(read_result(render))
        return
    files = sorted(MODEL.glob("*.gguf"))
    if not files:
        console().print(f"{MODEL} holds no GGUF file: this needs ../shared")
        raise typer.Exit(1)
    result = {
        "file": files[0].name,
        "settings": list(SETTINGS),
        "runs": measure(files[0], count, threads, tokens),
    }
    if not quick:
        console().print(str(write_result(NAME, result, threads)))
    show(result)


if __name__ == "__main__":
    typer.run(main)
