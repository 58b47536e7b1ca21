"""What one S3 store really does, as its probe found it.

Servers that speak S3 differ in what they ignore without a word. The adapter relies on
nothing that this value does not state.
"""

from dataclasses import dataclass, field
from enum import Enum

from proof.item import HashAlgorithm
from replicator.stitching import PART_BYTES_MIN
from replicator.stores.capabilities import Capabilities
from replicator.stores.s3_properties import METADATA_BYTES_MAX

OZONE = "ozone"
CEPH = "ceph"


class EtagForm(Enum):
    """How an ETag must stand in If-Match of a PUT."""

    IGNORED = "ignored"
    """In no form is the condition kept."""
    QUOTED = "quoted"
    BARE = "bare"
    """Ceph 16 compares the header's text with the ETag that it stores."""


class CopyWay(Enum):
    """How properties are replaced without moving data, cheapest first."""

    ITSELF = "itself"
    """CopyObject onto the same key."""
    SCRATCH = "scratch"
    """CopyObject to a scratch object and back; Ozone refuses the first way."""
    PARTS = "parts"
    """An upload of copied ranges; the ETag becomes that of an upload."""


@dataclass(frozen=True, slots=True)
class S3Behaviour:
    """Each field is a claim that was seen to hold; false where it was not.

    `etag_is_md5`: the ETag of an object written by one PUT is the MD5 of its bytes;
    None where there was no such object to look at. `checks_payloads`: a body of which
    another one was signed is refused; `checks_part_md5`: so is a part with another MD5,
    also if no body is signed; `checks_put_md5`: so is an object. `put_keeps_tags`,
    `upload_keeps_tags`: tags in the headers of PUT, of CreateMultipartUpload.
    `tags_apart`: PutObjectTagging works and harms no object. `counts_tags`: HEAD says
    how many there are. `copy_checks_source`: UploadPartCopy refuses another source or a
    range past its end. `upload_crc`: the CRC that it was seen to declare, of type
    FULL_OBJECT, of what was uploaded in parts. `copy_way`: by which CopyObject, if any,
    all old metadata and headers give way; `copy_takes_tags`: the tags too.
    `owner` is the ID of the bucket's owner, empty where ACLs are not kept. `reasons`
    are those of `Capabilities`.
    """

    kind: str = "s3"
    keeps_versions: bool = False
    etag_is_md5: bool | None = False
    checks_payloads: bool = False
    checks_part_md5: bool = False
    checks_put_md5: bool = False
    declares_checksums: bool = False
    put_keeps_tags: bool = False
    upload_keeps_tags: bool = False
    tags_apart: bool = False
    counts_tags: bool = False
    keeps_headers: bool = False
    keeps_underscores: bool = False
    keeps_acls: bool = False
    owner: str = ""
    creates_conditionally: bool = False
    put_if_match: EtagForm = EtagForm.IGNORED
    completes_conditionally: bool = False
    copies_ranges: bool = False
    copy_checks_source: bool = False
    upload_crc: HashAlgorithm | None = None
    copy_way: CopyWay = CopyWay.PARTS
    copy_takes_tags: bool = False
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def is_ozone(self) -> bool:
        """Whether this is Ozone's gateway, which must not get most sub-resources."""
        return self.kind == OZONE

    def capabilities(self) -> Capabilities:
        """The same, as the ports say it."""
        reasons = dict(self.reasons)
        crc = self.upload_crc.value if self.upload_crc is not None else ""
        reasons["whole_hashes"] = (
            f"what is uploaded in parts has a {crc} of the whole, what is put at once an MD5"
            if crc
            else "an object uploaded in parts has no hash of the whole"
        )
        if self.is_ozone:
            reasons["lists_all_keys"] = (
                "the gateway's listing loses keys where a bucket has both characters beyond"
                " U+FFFF and such from U+E000 to U+FFFF"
            )
        return Capabilities(
            kind=self.kind,
            keeps_versions=self.keeps_versions,
            keeps_tags=self.put_keeps_tags or self.tags_apart,
            keeps_acls=self.keeps_acls,
            keeps_headers=self.keeps_headers,
            creates_conditionally=self.creates_conditionally,
            replaces_conditionally=self.put_if_match is not EtagForm.IGNORED,
            completes_conditionally=self.completes_conditionally,
            copies_ranges=self.copies_ranges,
            lists_all_keys=not self.is_ozone,
            part_bytes_min=PART_BYTES_MIN,
            metadata_bytes_max=METADATA_BYTES_MAX,
            whole_hashes=(),
            part_etags_are_md5=self.etag_is_md5,
            upload_crc=crc,
            tells_whole_seconds=True,
            reasons=tuple(sorted(reasons.items())),
        )
