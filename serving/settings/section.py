"""What the sections of a deployment file have in common."""

from pydantic import (
    AliasChoices,
    AliasGenerator,
    BaseModel,
    ConfigDict,
    model_validator,
)

from serving.settings.names import refuse_two_names, spellings_of


class Section(BaseModel):
    """Refuses unknown settings, and names that were given twice."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=False,
        alias_generator=AliasGenerator(
            validation_alias=lambda field: AliasChoices(*spellings_of(field))
        ),
    )

    _name_each_once = model_validator(mode="before")(refuse_two_names)
