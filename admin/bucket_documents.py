"""`treefold bucket export` and `import`: the properties of a bucket as a document, and
a bucket made from one (OZ-021).
"""

import json
from pathlib import Path

import click

from admin.answer import json_option
from admin.command_result import command_result
from admin.confirmation import is_confirmed
from admin.paths import LocalPath
from replicator.bucket_properties import create_bucket, properties_json, read_properties
from replicator.prechecks import facts_of
from replicator.stores.address import canonical_address
from replicator.stores.opening import open_store
from runtime.disk import Disk


@click.command(short_help="Write the properties of a bucket as JSON.")
@click.argument("address", metavar="BUCKET")
@click.option(
    "--output",
    type=LocalPath(dir_okay=False, path_type=Path),
    help="Write to this file. Default: stdout.",
)
@json_option
def export(address: str, output: Path | None, as_json: bool) -> None:
    """Write the properties of BUCKET, such as layout, quota and ACLs, as JSON.

    `treefold bucket import` makes an equal bucket from it. Documents of equal buckets
    differ in `address` only.

    Exit status: 0 written, 1 failed, 2 usage, 7 the store does not answer.
    """
    with command_result("bucket export", as_json=as_json) as answer:
        address = canonical_address(address)
        with open_store(address, may_write=False) as store:
            document = properties_json(address, facts_of(store))
        answer.data = document
        text = json.dumps(document, indent=2, sort_keys=True) + "\n"
        if output is not None:
            Disk().replace(output.absolute(), text.encode())
            answer.print(f"{output}: the properties of {address}")
        else:
            answer.print(text.rstrip("\n"))


@click.command("import", short_help="Make a bucket with the properties of another.")
@click.argument("document", metavar="FILE", type=LocalPath(dir_okay=False, path_type=Path))
@click.argument("address", metavar="BUCKET")
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
def import_command(
    *, document: Path, address: str, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Make BUCKET with the properties in FILE, which `treefold bucket export` wrote.

    \b
    Exit status:
      0  made, 1 failed, or the store cannot make such a bucket
      2  usage, or FILE is not such a document
      6  not confirmed, 7 the store does not answer
    """
    with command_result("bucket import", as_json=as_json) as answer:
        facts, address = read_properties(document), canonical_address(address)
        plan = properties_json(address, facts)
        answer.data = {"plan": plan, "made": False}
        answer.print(f"Make {address} with these properties:")
        properties = plan["properties"]
        assert isinstance(properties, dict)
        for name, value in sorted(properties.items()):
            if value not in (None, []):
                answer.print(f"  {name}: {json.dumps(value)}")
        if dry_run or not is_confirmed(answer, "Make this bucket?", yes=yes):
            return
        create_bucket(address, facts)
        answer.data = {"plan": plan, "made": True}
        answer.print(f"{address}: made")
