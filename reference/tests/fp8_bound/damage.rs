//! What a verdict on an e4m3 product excludes.
