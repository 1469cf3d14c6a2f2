//! `marlinspike generate`: text from a model on the CPU.

mod text;

use std::io;
use std::num::NonZero;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use marlinspike_generate::config::ARCHITECTURES;
use marlinspike_generate::run::{Ended, Generated, Options};
use marlinspike_generate::sample::Sampling;
use marlinspike_generate::text::{Date, Helper, Message, Text, TextError, serve};
use marlinspike_generate::{Decoder, GenerateError};
use marlinspike_model::convert::target::int4;
use marlinspike_model::model::{Model, ModelFiles};
use serde_json::json;

use crate::error::Explained;
use crate::{Outcome, args, output, program};
use text::{prompt, show};

const DETAILS: &str = "\
Example: marlinspike generate ./packed --chat --prompt 'Why is the sky blue?'

MODEL is a folder that `marlinspike convert` wrote for the int4 path, which is mapped and starts at
once, or a 4-bit checkpoint (compressed-tensors, GPTQ and others), which is packed into memory first.
The folder needs a tokenizer.json. These models run: {types}.

The text goes to standard output as it is generated, times to standard error. The same model, prompt
and options give the same text for any number of threads and on every CPU. Without --temperature, or
with 0, the most probable token is chosen (greedy).

A text ends at a token of eos_token_id in generation_config.json (or config.json), or after
--max-tokens.

Examples:
  marlinspike generate ./packed --prompt 'Once upon a time'
  marlinspike generate ./packed --chat --system 'Answer briefly.' --prompt 'Who wrote Faust?'
  marlinspike generate ./packed --prompt-file notes.txt --max-tokens 500 --temperature 0.7 --top-p 0.9
  echo 'The sea' | marlinspike generate ./packed --prompt-file - --json

Exit codes:
  0  the text is complete
  2  bad input or usage, or a model that does not run";

/// Largest number of new tokens without `--max-tokens`.
const MAX_TOKENS: usize = 256;

/// What the model continues.
#[derive(Debug, Clone, clap::Args)]
#[group(required = true, multiple = false)]
pub struct PromptArgs {
    /// The prompt.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// File with the prompt; - is standard input.
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,
}

/// How tokens are chosen.
#[derive(Debug, Clone, clap::Args)]
pub struct SamplingArgs {
    /// Draw tokens from the softmax of logits / T instead of taking the largest logit; 0 takes the largest.
    #[arg(long, value_name = "T")]
    pub temperature: Option<f64>,
    /// Draw only from the K largest logits.
    #[arg(long, value_name = "K", requires = "temperature")]
    pub top_k: Option<usize>,
    /// Draw only from the largest probabilities, up to a sum of P.
    #[arg(long, value_name = "P", requires = "temperature")]
    pub top_p: Option<f64>,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0, requires = "temperature")]
    pub seed: u64,
}

impl SamplingArgs {
    fn sampling(&self) -> Sampling {
        let &Self { temperature, top_k, top_p, seed } = self;
        match temperature {
            // Engines call greedy decoding a temperature of 0.
            None | Some(0.0) => Sampling::Greedy,
            Some(temperature) => Sampling::Random { temperature, top_k, top_p, seed },
        }
    }
}

/// The long help.
fn details() -> String {
    let types: Vec<_> = ARCHITECTURES.iter().map(|a| a.model_type).collect();
    DETAILS.replace("{types}", &types.join(", "))
}

/// Generate text on the CPU.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = details())]
pub struct Args {
    /// Folder with a converted or an original checkpoint.
    pub model: PathBuf,
    /// The prompt.
    #[command(flatten)]
    pub prompt: PromptArgs,
    /// Wrap the prompt as a user's message by the model's chat template.
    #[arg(long)]
    pub chat: bool,
    /// System message of the conversation.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Date that the chat template prints, if it prints one [default: today in UTC].
    #[arg(long, value_name = "YYYY-MM-DD", requires = "chat")]
    pub date: Option<Date>,
    /// Largest number of new tokens [default: 256, or fewer if the model has fewer positions left].
    #[arg(long, value_name = "N", value_parser = args::repeats)]
    pub max_tokens: Option<NonZero<usize>>,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Worker threads [default: one per core].
    #[arg(long, value_name = "N", value_parser = args::threads)]
    pub threads: Option<NonZero<usize>>,
    /// Pin each thread to its own core; for machines without other load.
    #[arg(long)]
    pub pin: bool,
    /// Tokens of the prompt per pass; smaller passes need less memory [default: the whole prompt].
    #[arg(long, value_name = "N", value_parser = args::repeats)]
    pub chunk: Option<NonZero<usize>>,
    /// Memory limit for packed layers, KV cache and buffers, in GB [default: 90 % of the free memory].
    #[arg(long, value_name = "GB", value_parser = args::shard_gb)]
    pub memory: Option<f64>,
    /// Print one JSON object instead of the text.
    #[arg(long)]
    pub json: bool,
}

impl Args {
    /// The prompt's text.
    fn text(&self) -> anyhow::Result<String> {
        match (&self.prompt.prompt, &self.prompt.prompt_file) {
            (Some(text), _) => Ok(text.clone()),
            (None, Some(path)) if path.as_os_str() == "-" => {
                prompt(io::stdin().lock()).context("standard input")
            }
            (None, Some(path)) => {
                let read = program::open_regular(path).map_err(Into::into).and_then(prompt);
                read.with_context(|| path.display().to_string())
            }
            (None, None) => Ok(String::new()),
        }
    }

    fn tokens(&self, text: &Text) -> anyhow::Result<Vec<u32>> {
        let prompt = self.text()?;
        if !self.chat {
            return text.encode(&prompt).map_err(explain_text);
        }
        let system = self.system.iter().map(|text| Message { role: "system", content: text });
        let user = Message { role: "user", content: &prompt };
        let messages: Vec<_> = system.chain([user]).collect();
        text.encode_chat(&messages).map_err(explain_text)
    }

    /// The worker threads. With more threads than cores, or where the system does not pin, they float.
    fn pool(&self) -> Result<rayon::ThreadPool, rayon::ThreadPoolBuildError> {
        let threads = self.threads.map_or_else(rayon::current_num_threads, NonZero::get);
        let mut builder = rayon::ThreadPoolBuilder::new().num_threads(threads);
        let cores = core_affinity::get_core_ids().unwrap_or_default();
        if self.pin && threads <= cores.len() {
            builder = builder.start_handler(move |i| {
                core_affinity::set_for_current(cores[i]);
            });
        }
        builder.build()
    }

    /// The limit of memory in bytes.
    fn memory_limit(&self) -> u64 {
        match self.memory {
            Some(gb) => (gb * 1e9) as u64,
            None => available_memory().map_or(u64::MAX, |bytes| bytes / 10 * 9),
        }
    }
}

/// Bytes that programs can still allocate, where the system states them.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The hidden command whose process reads tokenizer and template.
const WORKER: &str = "text-worker";

/// Reads tokenizer and template for [`run`], in a process with limits of the operating system.
///
/// # Errors
/// The system's.
pub fn worker() -> anyhow::Result<Outcome> {
    serve()?;
    Ok(Outcome::Pass)
}

/// Runs the command.
///
/// # Errors
/// Names the file, key, tensor or option that cannot be used.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let pool = args.pool().context("worker threads")?;
    let threads = pool.current_num_threads();
    let begun = Instant::now();
    crate::hint::expect_model(&args.model)?;
    let files = ModelFiles::open(&args.model)?;
    let helper = Helper::new(program::own().context("this program's path")?, [WORKER]);
    let mut text = Text::open_with(&args.model, &helper).map_err(explain_text)?;
    if let Some(date) = args.date {
        text = text.with_date(date);
    }
    let model = Model::new(&files)?;
    let limit = args.memory_limit();
    let decoder = pool.install(|| Decoder::load(&model, limit)).map_err(explain)?;
    let loaded = begun.elapsed();
    let prompt = args.tokens(&text)?;
    let left = decoder.config().max_positions.saturating_sub(prompt.len());
    // A prompt that leaves no position is an error of `generate`.
    let max_tokens = args.max_tokens.map_or(MAX_TOKENS.min(left).max(1), NonZero::get);
    let options = Options {
        max_tokens,
        sampling: args.sampling.sampling(),
        stop: text.stop().to_vec(),
        chunk: args.chunk,
        memory_limit: limit,
    };
    let mut stream = text.stream();
    let (mut written, mut failed) = (String::new(), None);
    let made = pool.install(|| {
        decoder.generate(&prompt, &options, |token| match stream.push(token) {
            Ok(piece) => {
                if !args.json {
                    show(&piece, &mut failed);
                }
                written.push_str(&piece);
                if failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            }
            Err(e) => {
                failed = Some(explain_text(e));
                ControlFlow::Break(())
            }
        })
    });
    let made = made.map_err(explain)?;
    let rest = stream.finish().map_err(explain_text)?;
    written.push_str(&rest);
    if failed.is_none() && !args.json {
        show(&format!("{rest}\n"), &mut failed);
    }
    if let Some(error) = failed {
        // A reader that closed the pipe has seen enough.
        let closed = |e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe;
        return match error.downcast_ref::<io::Error>().is_some_and(closed) {
            true => Ok(Outcome::Pass),
            false => Err(error),
        };
    }
    if args.json {
        output::print(&format!("{}\n", report(&made, &prompt, &written, (loaded, threads))))?;
    }
    eprintln!("{}", summary(&made, prompt.len(), loaded, threads));
    Ok(Outcome::Pass)
}

/// One line about times.
fn summary(made: &Generated, prompt: usize, loaded: Duration, threads: usize) -> String {
    let speed = made.tokens_per_second().map(|speed| format!(", then {speed:.1} tokens/s"));
    format!(
        "loaded in {:.2} s; {prompt} tokens of prompt, first token after {:.3} s{}; {} new tokens, {} \
         threads; ended by {}",
        loaded.as_secs_f64(),
        made.first.as_secs_f64(),
        speed.unwrap_or_default(),
        made.tokens.len(),
        threads,
        ended(made.ended),
    )
}

fn ended(ended: Ended) -> String {
    match ended {
        Ended::Stop(token) => format!("stop token {token}"),
        Ended::Length => "--max-tokens".to_owned(),
        Ended::Caller => "the reader".to_owned(),
    }
}

fn report(
    made: &Generated,
    prompt: &[u32],
    text: &str,
    (loaded, threads): (Duration, usize),
) -> serde_json::Value {
    let stop_token = match made.ended {
        Ended::Stop(token) => Some(token),
        _ => None,
    };
    json!({
        "text": text,
        "prompt_tokens": prompt,
        "tokens": made.tokens,
        "stop_token": stop_token,
        "load_seconds": loaded.as_secs_f64(),
        "first_token_seconds": made.first.as_secs_f64(),
        "tokens_per_second": made.tokens_per_second(),
        "threads": threads,
    })
}

/// Adds a help line to an error.
fn explain(error: GenerateError) -> anyhow::Error {
    let to = int4::FORMAT.name();
    let help = match &error {
        GenerateError::TooLong { .. } => {
            "shorten the prompt or state a smaller --max-tokens".to_owned()
        }
        GenerateError::Memory { .. } => format!(
            "convert the model with `marlinspike convert --to {to}`, state a smaller --max-tokens or \
             --chunk, or raise the limit with --memory GB"
        ),
        GenerateError::Converted { .. } => {
            format!("convert the model with `marlinspike convert --to {to}`")
        }
        GenerateError::Architecture { .. } => {
            "single layers of other models run with `marlinspike run`".to_owned()
        }
        GenerateError::Layer(_) => {
            "`marlinspike inspect MODEL` shows which kernels take each layer".to_owned()
        }
        _ => return error.into(),
    };
    Explained::new(error, help).into()
}

fn explain_text(error: TextError) -> anyhow::Error {
    let help = match &error {
        TextError::NoTokenizer { .. } => "copy the model's tokenizer.json into the folder",
        TextError::NoTemplate { .. } | TextError::Template { .. } => {
            "without --chat the prompt is continued as it is"
        }
        TextError::Limit { .. } => {
            "no published tokenizer or template needs as much; the limits are in SECURITY.md"
        }
        _ => return error.into(),
    };
    Explained::new(error, help).into()
}
