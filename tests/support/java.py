"""Options of the JVMs that tests start, and Spark's classes as an archive, which Java
maps instead of reading and checking them anew: a start takes half as long. `python -m
tests.support.java` makes it once for an environment and a Java.
"""

import hashlib
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

# One that ends within a minute is over before its second compiler and the threads of
# its collector are worth their time, which is half of what Spark takes. Nor is it
# worth it to collect classes and code: there is room for all that one loads.
SHORT_LIVED = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:MetaspaceSize=256m"
    " -XX:ReservedCodeCacheSize=240m -XX:-UseCodeCacheFlushing"
)
# Not imported: most tests need none of it.
_SPARK = distribution("pyspark")
# What uses the classes that tests use.
_JOB = Path(__file__).with_name("spark_job.py")


def spark_options() -> str:
    """The options of each JVM of Spark's, with the archive if there is one. A wrong one
    would be passed over, with a warning where results are read.
    """
    archive = _archive()
    mapped = f" -XX:SharedArchiveFile={archive} -Xlog:disable" if archive.exists() else ""
    return SHORT_LIVED + mapped


def _archive() -> Path:
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else "java"
    try:
        said = subprocess.run([java, "-version"], capture_output=True, check=True).stderr
    except OSError:
        said = b""
    key = hashlib.sha256(said + _SPARK.version.encode() + os.fsencode(sys.prefix)).hexdigest()[:16]
    return Path(sys.prefix) / f"spark-classes-{key}.jsa"


def _make() -> None:
    archive = _archive()
    if archive.exists():
        return
    sys.stderr.write("setup: archiving Spark's classes\n")
    new = archive.with_name(f"{archive.name}.{os.getpid()}")
    options = f"{SHORT_LIVED} -XX:ArchiveClassesAtExit={new} -Xlog:disable"
    done = subprocess.run(
        [str(_SPARK.locate_file("pyspark/bin/spark-submit")), "--master", "local[2]", _JOB],
        env={
            **os.environ,
            "SPARK_SUBMIT_OPTS": options,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode == 0 and new.exists():
        new.replace(archive)
    else:
        new.unlink(missing_ok=True)
        sys.stderr.write("setup: this Java makes no archive; tests do without, and take longer\n")


if __name__ == "__main__":
    _make()
