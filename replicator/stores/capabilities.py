"""What a store can keep and do."""

from dataclasses import dataclass

# The headers of an object that cross with it.
CONTENT_HEADERS = frozenset(
    {
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "expires",
    }
)
# ACLs with the grantees and rights of Ozone; others have those of S3.
OZONE_ACLS = "ozone"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do, found out before the first write.

    `part_bytes_min` is 0 where parts of any size are taken. `whole_hashes` are the
    algorithms by which the store can describe every object it is given from now on.
    `stamps_cover_properties`: whatever changes an object's properties changes its stamp
    too; S3's tags and ACLs change without. `part_etags_are_md5`: the ETag of a part
    that was written, not copied, is the MD5 of its bytes; None if that is not known of
    a store that is only read. `upload_crc` is the CRC (of HashAlgorithm, by its value)
    that the store declares of the whole of each object that is uploaded in parts; empty
    where it declares none. `records_hashes`: asked for one object, the store tells
    hashes that its listings lack. `acl_form` says whose grantees and permissions its
    ACLs have: they cross to the same. `tells_whole_seconds`: some of its answers have
    times without ms. `reasons` has the name of a field above and the
    reason for its value, where the store lacks something or was not asked.
    """

    kind: str
    keeps_versions: bool
    keeps_tags: bool
    keeps_acls: bool
    keeps_headers: bool
    creates_conditionally: bool
    replaces_conditionally: bool
    completes_conditionally: bool
    copies_ranges: bool
    lists_all_keys: bool
    part_bytes_min: int
    metadata_bytes_max: int
    whole_hashes: tuple[str, ...]
    reasons: tuple[tuple[str, str], ...] = ()
    stamps_cover_properties: bool = False
    part_etags_are_md5: bool | None = False
    upload_crc: str = ""
    records_hashes: bool = False
    acl_form: str = "s3"
    tells_whole_seconds: bool = False
