#!/bin/bash -eu
exec "$SRC/marlinspike/tools/fuzz/oss-fuzz.sh"
