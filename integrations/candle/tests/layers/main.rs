//! The layers on candle's tensors, against the definition and against wrong inputs.

mod blocks;
mod common;
mod folders;
mod layers;
mod refusals;
