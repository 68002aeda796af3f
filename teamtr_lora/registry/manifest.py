"""What a stored adapter and a stored team say of themselves. Strict: a key or a value that is not foreseen is refused."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, ValidationError, model_validator

from teamtr_lora.base.versions import MAX_NUMBER, VERSION_NAME, AdapterVersion
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, sha256
from teamtr_lora.common.settings import SAFE_NAME, Section
from teamtr_lora.recipe import Recipe
from teamtr_lora.recipe.problems import check

FORMAT: Literal[1] = 1
CARD = "README.md"
OWN_HASH = "manifest_hash"

Name = Annotated[str, Field(pattern=SAFE_NAME)]
VersionName = Annotated[str, Field(pattern=VERSION_NAME)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Number = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
# One line of text that a terminal and a card can show as it is: no control characters.
Line = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]
Metrics = Annotated[dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9@_./ -]{1,100}$")], float], Field(max_length=1000)]
Time = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")]
MadeBy = Literal["train", "swap", "stage0", "rebase", "import"]


class _Strict(Section):
    model_config = ConfigDict(frozen=True)


class BaseIdentity(_Strict):
    """The frozen model that adapters belong to: what it was called, and the hash of its stored weights."""

    source: Line
    revision: Line | None = None
    weights_hash: Hash


class _Manifest(_Strict):
    """What both kinds say."""

    format: Literal[1] = FORMAT
    team: Name
    number: Number
    base: BaseIdentity
    tokenizer_hash: Hash
    protocol_hash: Hash
    metrics: Metrics = Field(default_factory=dict)
    created: Time
    manifest_hash: Hash = Field(description="over everything else: what the other hashes do not cover cannot be altered unseen")


class AdapterManifest(_Manifest):
    """manifest.json of one adapter version."""

    agent: Name
    version: VersionName
    parent: Line | None = Field(default=None, description="the version it was made from: VERSION, or TEAM/AGENT/VERSION")
    made_by: MadeBy
    content_hash: Hash
    files: dict[Literal["adapter_model.safetensors", "adapter_config.json", "README.md"], Hash] = Field(
        min_length=3, description="sha256 of every file beside the manifest"
    )

    @model_validator(mode="after")
    def _name_is_the_contents(self) -> Self:
        self.adapter_version()
        return self

    def adapter_version(self) -> AdapterVersion:
        """The version that this manifest is about."""
        return AdapterVersion.from_stored(self.agent, self.model_dump(include={"number", "content_hash", "version"}))


class Replaced(_Strict):
    """One step of a team's lineage."""

    agent: Name
    old: VersionName | None
    new: VersionName
    how: Line


class TeamManifest(_Manifest):
    """team-NNNN.json: one immutable version of a team. The highest number is the current team."""

    recipe: dict[str, Any] = Field(description="the resolved recipe")
    agents: dict[Name, VersionName] = Field(min_length=1)
    parent: Number | None = Field(default=None, description="number of the team version this one was made from")
    made_by: MadeBy | Literal["undo"]
    lineage: list[Replaced] = Field(default_factory=list, max_length=10_000, description="what was replaced in the parent")

    @model_validator(mode="after")
    def _parent_is_older(self) -> Self:
        if self.parent is not None and self.parent >= self.number:
            raise ValueError(f"parent {self.parent} is not older than number {self.number}")
        return self

    def load_recipe(self) -> Recipe:
        """The recipe, checked like one from a file; its agents and its base must be the team's."""
        recipe, problems = check(self.recipe)
        where = f"{self.team} {team_file(self.number)} recipe"
        if recipe is None:
            raise UserError(f"{where}: {' '.join(str(problems[0]).split())[:500]}")
        if {agent.name for agent in recipe.team.agents} != self.agents.keys():
            raise UserError(f"{where}: its agents are not the team's ({', '.join(self.agents)}); the file was altered")
        if (recipe.base.source, recipe.base.revision) != (self.base.source, self.base.revision):
            raise UserError(f"{where}: its base is {recipe.base.source!r}, the team's is {self.base.source!r}; they must be one")
        return recipe


def team_file(number: int) -> str:
    return f"team-{number:04d}.json"


def one_line(text: str) -> str:
    """Any text on one line, without control characters, as a manifest takes it."""
    return "".join(c if c.isprintable() else "?" for c in text)[:1000] or "-"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


Model = TypeVar("Model", AdapterManifest, TeamManifest)


def own_hash(data: Mapping[str, Any]) -> str:
    """The hash of a manifest's JSON data, without the field that holds this hash."""
    return sha256(dump_json({key: value for key, value in data.items() if key != OWN_HASH}).encode())


def make_manifest(model: type[Model], data: Mapping[str, Any], where: str) -> Model:
    """A new manifest from its fields, sealed by its own hash."""
    return sealed(checked(model, {**data, OWN_HASH: "0" * 64}, where))


def sealed(manifest: Model) -> Model:
    """The manifest with the hash of what it says now."""
    return manifest.model_copy(update={OWN_HASH: own_hash(manifest.model_dump(mode="json"))})


def manifest_bytes(manifest: AdapterManifest | TeamManifest) -> bytes:
    """The manifest as its file has it."""
    return dump_json(manifest.model_dump(mode="json")).encode()


def read_manifest(model: type[Model], data: Mapping[str, Any], where: str) -> Model:
    """A stored manifest out of its JSON data; refused where its own hash does not fit."""
    manifest = checked(model, data, where)
    try:
        found = own_hash(data)
    except (ValueError, RecursionError) as error:  # 1e999 is valid JSON but becomes infinity, which cannot be written
        raise UserError(f"{where}: not a proper manifest (a number is too large, or a value nested too deep)") from error
    if manifest.manifest_hash != found:
        raise UserError(f"{where}: does not match its {OWN_HASH}; the file was altered")
    return manifest


def checked(model: type[Model], data: Mapping[str, Any], where: str) -> Model:
    """`data` as a manifest, or one line that says what is wrong with it and where."""
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part)[:64] for part in first["loc"])
        what = f"{key}: {first['msg']}" if key else first["msg"]
        raise UserError(f"{where}: not a proper manifest ({' '.join(what.split())})") from error
