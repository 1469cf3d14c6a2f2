#!/bin/bash -eu
exec "$SRC/marlinspike/fuzz/oss-fuzz.sh"
