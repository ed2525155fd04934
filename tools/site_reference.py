"""Generate the reference pages of the documentation site: commands, protocol and Python API."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from grpc_tools import protoc

# Module -> title of the page. The page lists the names in the module's __all__.
API = {
    "hil": "Run models",
    "hil.testing": "Test modules",
    "hil.traces": "Traces",
    "hil.plugins": "Plugins",
    "hil.errors": "Errors",
}
# FileDescriptorProto's field numbers (google/protobuf/descriptor.proto) in the paths of source locations.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS = _METHODS = _VALUES = 2


def describe_commands(cli: click.Group) -> str:
    """Return a Markdown page with the help of every command."""
    parts = ["# Commands", "This page is the output of `--help`."]
    for path, command in _walk_commands(cli, "hil"):
        context = click.Context(command, info_name=path, max_content_width=100)
        parts.append(f"## {path}\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(parts) + "\n"


def _walk_commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            if found := command.get_command(context, name):
                yield from _walk_commands(found, f"{path} {name}")


def describe_protocol(proto: Path) -> str:
    """Return a Markdown page with the services, messages and enums of a .proto file, and their comments."""
    file = _parse_proto(proto)
    comments = {tuple(one.path): one.leading_comments for one in file.source_code_info.location}
    syntax = next(one for one in file.source_code_info.location if list(one.path) == [12])
    parts = [f"# {file.package}: {proto.name}", *map(_clean_comment, syntax.leading_detached_comments)]
    parts.append(_clean_comment(syntax.leading_comments))
    for number, service in enumerate(file.service):
        parts.append(f"## {service.name}\n\n{_clean_comment(comments.get((_SERVICES, number), ''))}")
        rows = [
            (
                f"`{method.name}`",
                f"{'stream ' * method.client_streaming}{_shorten_name(method.input_type)}",
                f"{'stream ' * method.server_streaming}{_shorten_name(method.output_type)}",
                comments.get((_SERVICES, number, _METHODS, row), ""),
            )
            for row, method in enumerate(service.method)
        ]
        parts.append(_format_table(("call", "request", "reply", "description"), rows))
    for number, message in enumerate(file.message_type):
        parts += _describe_message(message, message.name, (_MESSAGES, number), comments)
    for number, enum in enumerate(file.enum_type):
        parts += _describe_enum(enum, enum.name, (_ENUMS, number), comments)
    return "\n\n".join(part for part in parts if part.strip()) + "\n"


def _parse_proto(proto: Path) -> FileDescriptorProto:
    with TemporaryDirectory() as directory:
        out = Path(directory) / "set"
        root = proto.parents[2]
        arguments = ["protoc", f"-I{root}", "--include_source_info", f"--descriptor_set_out={out}", str(proto)]
        if protoc.main(arguments):
            raise SystemExit(f"cannot parse {proto}")
        [file] = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    return file


def _describe_message(
    message: Any, name: str, path: tuple[int, ...], comments: dict[tuple[int, ...], str]
) -> list[str]:
    parts = [f"## {name}", _clean_comment(comments.get(path, ""))]
    entries = {f".{nested.name}": nested for nested in message.nested_type if nested.options.map_entry}
    rows = []
    for number, field in enumerate(message.field):
        kind = _shorten_name(field.type_name) or FieldDescriptorProto.Type.Name(field.type)[len("TYPE_") :].lower()
        entry = next((found for suffix, found in entries.items() if field.type_name.endswith(suffix)), None)
        if entry is not None:
            kind = "map"
        elif field.label == FieldDescriptorProto.LABEL_REPEATED:
            kind = f"repeated {kind}"
        elif field.proto3_optional:
            kind = f"optional {kind}"
        rows.append((str(field.number), f"`{field.name}`", kind, comments.get((*path, _FIELDS, number), "")))
    parts.append(
        _format_table(("number", "field", "type", "description"), rows) if rows else "This message has no fields."
    )
    for number, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            parts += _describe_message(nested, f"{name}.{nested.name}", (*path, 3, number), comments)
    for number, enum in enumerate(message.enum_type):
        parts += _describe_enum(enum, f"{name}.{enum.name}", (*path, 4, number), comments)
    return parts


def _describe_enum(enum: Any, name: str, path: tuple[int, ...], comments: dict[tuple[int, ...], str]) -> list[str]:
    rows = [
        (str(value.number), f"`{value.name}`", comments.get((*path, _VALUES, number), ""))
        for number, value in enumerate(enum.value)
    ]
    text = _clean_comment(comments.get(path, ""))
    return [f"## {name}", text, _format_table(("number", "value", "description"), rows)]


def describe_api(module: str, title: str) -> str:
    """Return a Markdown page that mkdocstrings fills with the docstrings of a module's public names."""
    found = importlib.import_module(module)
    names = [name for name in getattr(found, "__all__", ()) if not name.startswith("__")]
    if not names:  # hil.errors has no __all__: list all classes
        names = [name for name, value in vars(found).items() if isinstance(value, type) and value.__module__ == module]
    directives = "\n\n".join(f"::: {module}.{name}" for name in names)
    return f"# {title}: {module}\n\n{(found.__doc__ or '').strip()}\n\n{directives}\n"


def _shorten_name(type_name: str) -> str:
    return type_name.removeprefix(".hil.v1.")


def _clean_comment(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines()]
    return "\n".join(lines).replace("<", "&lt;")


def _format_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(_escape_cell(cell) for cell in line)} |" for line in lines)


def _escape_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
