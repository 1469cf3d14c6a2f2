//! From a prompt to tokens.

use std::num::NonZero;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use crate::attention::Input;
use crate::decoder::{Decoder, LogitsOf};
use crate::error::{GenerateError, Result};
use crate::sample::{Sampler, Sampling};

/// What to generate.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The largest number of new tokens.
    pub max_tokens: usize,
    /// How each is chosen.
    pub sampling: Sampling,
    /// Tokens that end the text.
    pub stop: Vec<u32>,
    /// Tokens of the prompt per forward call; absent: all. Smaller calls need less memory.
    pub chunk: Option<NonZero<usize>>,
    /// Memory limit in bytes for packed layers, the KV cache and the buffers of a call: [`Decoder::memory`].
    pub memory_limit: u64,
}

impl Options {
    /// Greedy, the prompt in one call, without stop tokens and limits of memory.
    pub fn greedy(max_tokens: usize) -> Self {
        let (sampling, stop) = (Sampling::Greedy, Vec::new());
        Self { max_tokens, sampling, stop, chunk: None, memory_limit: u64::MAX }
    }
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// A stop token was chosen.
    Stop(u32),
    /// [`Options::max_tokens`] were chosen.
    Length,
    /// The caller wanted no more.
    Caller,
}

/// The tokens of a text, without the stop token.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// The new tokens.
    pub tokens: Vec<u32>,
    /// Why there are no more.
    pub ended: Ended,
    /// Time from the call to the first token.
    pub first: Duration,
    /// Time of all later tokens, the stop token included.
    pub later: Duration,
    /// Calls that `later` measures.
    pub later_calls: usize,
}

impl Generated {
    /// Tokens per second after the first; `None` if there is only one.
    pub fn tokens_per_second(&self) -> Option<f64> {
        (self.later_calls > 0).then(|| self.later_calls as f64 / self.later.as_secs_f64())
    }
}

impl Decoder<'_> {
    /// Continues `prompt`, on rayon's current pool. `each` receives every new token as it is chosen.
    ///
    /// # Errors
    /// [`GenerateError::TooLong`] and [`GenerateError::Memory`] before anything is computed; errors of
    /// [`Decoder::forward`] and [`Sampler::new`].
    pub fn generate(
        &self,
        prompt: &[u32],
        options: &Options,
        mut each: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated> {
        let begun = Instant::now();
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let mut sampler = Sampler::new(options.sampling)?;
        let (new, limit) = (options.max_tokens, self.config().max_positions);
        let capacity = prompt.len().saturating_add(new);
        if capacity > limit {
            return Err(GenerateError::TooLong { prompt: prompt.len(), new, limit });
        }
        let chunk = options.chunk.map_or(prompt.len(), NonZero::get).min(prompt.len());
        let needed = self.memory(capacity, chunk);
        if needed > options.memory_limit {
            let what = format!("a KV cache for {capacity} tokens, {chunk} of them per call,");
            return Err(GenerateError::Memory { what, needed, limit: options.memory_limit });
        }
        let mut cache = self.cache(capacity, options.memory_limit)?;
        let (mut tokens, mut ended) = (Vec::new(), Ended::Length);
        let (mut first, mut later_calls) = (Duration::ZERO, 0);
        let mut logits = Vec::new();
        for part in prompt.chunks(chunk) {
            let mut inputs = [Input { tokens: part, cache: &mut cache }];
            logits = self.forward(&mut inputs, LogitsOf::Last)?;
        }
        while tokens.len() < new {
            let token = sampler.next(&logits);
            if first.is_zero() {
                first = begun.elapsed();
            }
            if options.stop.contains(&token) {
                ended = Ended::Stop(token);
                break;
            }
            tokens.push(token);
            if each(token).is_break() {
                ended = Ended::Caller;
                break;
            }
            if tokens.len() < new {
                let mut inputs = [Input { tokens: &[token], cache: &mut cache }];
                logits = self.forward(&mut inputs, LogitsOf::Last)?;
                later_calls += 1;
            }
        }
        let later = begun.elapsed().saturating_sub(first);
        Ok(Generated { tokens, ended, first, later, later_calls })
    }
}
