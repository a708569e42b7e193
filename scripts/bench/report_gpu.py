"""The bench on one card: medians of its measurements, and its section of the page."""

from collections.abc import Iterable
from typing import Any

from measuring import median
from tables import say_bytes, say_count, say_rate, say_ratio, say_share, table

WAYS = {"written": "stored and verified", "bare": "bare passes", "read": "read to host memory"}
# What others say of themselves, for each GPU and in terms of an 8B model.
_PUBLISHED = (
    ("fpwap, nothing stored", "RTX 5090", "11,900"),
    ("activault, from its claim of 33,000 tokens/s of a 70B model on 8 H100s", "H100", "about 29,000"),
    ("the hosted API's engine", "L40S", "5,000"),
)


def gpu_section(measured: dict[str, Any]) -> list[str]:
    """Return the section's lines. What was left out or failed is named, and the rest is shown."""
    card = measured["card"]
    place = f"{card['name']}, {say_bytes(card['memory_bytes'])}" if card else f"no card: {measured['device']}"
    lines = [
        f"## One card: {place}",
        "",
        f"A model of random weights at the shape {measured['shape']} with {measured['n_layers']} blocks in {measured['dtype']}. Tokens are "
        "real ones: padding does not count. Stored and verified: all shards published, then checked outside the clock.",
        "",
        *_results(measured["summary"]),
        "",
        "Published figures, not measured here, for each GPU and in terms of an 8B model:",
        "",
        *table(["", "GPU", "tokens/s"], _PUBLISHED),
        "",
        *_plans(measured),
    ]
    for part in ("ceilings", "attention", "profile", "race"):
        if measured.get(part):
            lines += ["", *_PARTS[part](measured[part])]
    if measured["left_out"]:
        lines += ["", f"Left out for lack of time: {'; '.join(measured['left_out'])}."]
    for name, reason in measured["failed"].items():
        lines += ["", f"**FAILED: {name}** ({reason})"]
    return lines


def _results(summary: Iterable[dict[str, Any]]) -> list[str]:
    header = ["case", "way", "tokens", "tokens/s", "lowest – highest", "÷ bare", "of products", "GB/s", "of copies", "of disk"]
    rows = [
        [
            entry["case"],
            WAYS[entry["way"]] if entry["is_right"] else "**WRONG**",
            f"{entry['tokens']:,}",
            say_rate(entry["tokens_per_s"]),
            f"{say_rate(entry['lowest'])} – {say_rate(entry['highest'])}",
            say_ratio(entry["of_bare"]),
            say_share(entry["of_products"]),
            "" if entry["bytes_per_s"] is None else f"{entry['bytes_per_s'] / 1e9:.3g}",
            say_share(entry["of_copy"]),
            say_share(entry["of_disk"]),
        ]
        for entry in summary
    ]
    return table(header, rows)


def _plans(measured: dict[str, Any]) -> list[str]:
    """How each case's tokens were cut, and what was compared of what was stored."""
    header = [
        "case",
        "windows",
        "window memory",
        "batches",
        "tokens a batch",
        "budget",
        "padding",
        "shards",
        "compared prompts",
        "worst error",
    ]
    rows, wrong = [], []
    for plan in measured["plans"]:
        checks = [entry["check"] for entry in measured["measurements"] if entry["case"] == plan["case"] and entry["way"] == "written"]
        errors = [check["worst_error"] for check in checks if check["worst_error"] is not None]
        rows.append(
            [
                plan["case"],
                f"{plan['windows']:,}",
                say_bytes(plan["window_bytes"]),
                f"{plan['batches']:,}",
                f"{plan['mean_batch_tokens']:,.0f}",
                f"{plan['batch_tokens']:,}",
                f"{plan['padding']:.3f}",
                f"{sum(check['shards'] for check in checks):,}",
                f"{sum(check['prompts'] for check in checks):,}",
                f"{max(errors):.1e}" if errors else "",
            ]
        )
        findings = [finding for check in checks for finding in check["findings"]]
        wrong += ["", f"**WRONG VALUES: {plan['case']}: {'; '.join(findings[:5])}; {len(findings)} in all**"] if findings else []
    note = (
        "Budget: padded tokens of one pass; padding: padded tokens for each real one. Shards and prompts are those of all rounds; the "
        "error is that of a layer of a prompt against a second reading, relative to its norm."
    )
    return [*table(header, rows), "", note, *wrong]


def _ceilings(ceilings: dict[str, Any]) -> list[str]:
    products = ", ".join(f"{shape} {rate / 1e12:,.2f}" for shape, rate in ceilings["products"].items())
    return [
        f"Matrix products of {ceilings['product_tokens']:,} tokens in TFLOP/s: {products}. Copies to host memory: "
        f"{ceilings['copy_bytes_per_s'] / 1e9:.2f} GB/s. A file with fsync: {ceilings['disk_bytes_per_s'] / 1e9:.2f} GB/s."
    ]


def _attention(measured: list[dict[str, Any]]) -> list[str]:
    backends = list(dict.fromkeys(entry["backend"] for entry in measured))
    cells = {
        (entry["length"], entry["backend"]): f"{entry['flop_s'] / 1e12:,.2f}" if "flop_s" in entry else "not available"
        for entry in measured
    }
    rows = [
        [f"{length:,}", *(cells.get((length, backend), "") for backend in backends)] for length in dict.fromkeys(key[0] for key in cells)
    ]
    reasons = dict.fromkeys(f"{entry['backend']}: {entry['reason']}" for entry in measured if "reason" in entry)
    lines = ["Attention alone, causal and without a mask, in TFLOP/s by the tokens of a row:", ""]
    return [*lines, *table(["tokens", *backends], rows), *(line for reason in reasons for line in ("", f"Not available: {reason}"))]


def _profile(profile: dict[str, Any]) -> list[str]:
    if "reason" in profile:
        return [f"Launches, waits and idle time: left out; {profile['reason']}."]
    waits = ", ".join(f"{name} {count:.2f}" for name, count in profile["waits_per_batch"].items()) or "none"
    longest = ", ".join(f"`{name[:60]}` {share:.1%}" for name, share in list(profile["kernel_shares"].items())[:6])
    return [
        f"Reading under torch's profiler ({profile['batches']} batches): "
        f"{profile['launches_per_batch']:,.0f} kernel launches a batch; calls that make the host wait, a batch: {waits}; no kernel runs in "
        f"{profile['idle_share']:.1%} of the time. Shares of the kernels' time: {longest}."
    ]


def _race(races: list[dict[str, Any]]) -> list[str]:
    lines = []
    for race in races:
        n_differing = sum(map(bool, race["differing_values"]))
        repeats = "agree" if race["sync_repeats"] else "DO NOT AGREE"
        pinned = ", pinned memory" if race["is_pinned"] else ""
        lines += [
            f"Copies against a synchronous run, bit for bit: {n_differing} of {race['runs']} runs differ ({race['values']:,} values in "
            f"{say_count(race['windows'], 'window')} and {race['batches']} batches each{pinned}); two synchronous runs {repeats}.",
            "",
        ]
    return lines[:-1]


_PARTS: dict[str, Any] = {"ceilings": _ceilings, "attention": _attention, "profile": _profile, "race": _race}


def summarise(measurements: list[dict[str, Any]], ceilings: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return medians of each way of each case, against the bare passes of the same round and against what the machine does."""
    summary = []
    for case in dict.fromkeys(entry["case"] for entry in measurements):
        of_case = [entry for entry in measurements if entry["case"] == case]
        bare = {entry["round"]: entry for entry in of_case if entry["way"] == "bare"}
        flop = next((entry["flop"] / entry["tokens"] for entry in bare.values()), None)
        for way in WAYS:
            rates = {entry["round"]: entry["tokens"] / entry["seconds"] for entry in of_case if entry["way"] == way}
            if not rates:
                continue
            of_way, rate = [entry for entry in of_case if entry["way"] == way], median(rates.values())
            of_bare = [rates[turn] * bare[turn]["seconds"] / bare[turn]["tokens"] for turn in rates if turn in bare]
            bytes_per_s = None if way == "bare" else rate * of_way[0]["token_bytes"]
            summary.append(
                {
                    "case": case,
                    "way": way,
                    "tokens": of_way[0]["tokens"],
                    "tokens_per_s": rate,
                    "lowest": min(rates.values()),
                    "highest": max(rates.values()),
                    "is_right": not any(entry["check"]["findings"] for entry in of_way if "check" in entry),
                    "bytes_per_s": bytes_per_s,
                    "of_bare": median(of_bare) if of_bare else None,
                    "of_products": flop * rate / max(ceilings["products"].values()) if ceilings and flop else None,
                    "of_copy": bytes_per_s / ceilings["copy_bytes_per_s"] if ceilings and bytes_per_s else None,
                    "of_disk": bytes_per_s / ceilings["disk_bytes_per_s"] if ceilings and bytes_per_s and way == "written" else None,
                }
            )
    return summary
