//! Chat templates, as transformers renders them.

use std::{panic, thread};

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, context};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::date::Date;
use super::library::library;

/// Largest chat template, in bytes; those of published models have less than 40,000.
pub(super) const TEMPLATE_LIMIT: usize = 128 << 10;

/// A rendering may take [`BASE_STEPS`] steps, [`STEPS_PER_MESSAGE`] more for each message and
/// [`STEPS_PER_BYTE`] more for each byte of a message. A step is one instruction, or 64 bytes of text
/// that an instruction makes.
const BASE_STEPS: u64 = 200_000;
const STEPS_PER_MESSAGE: u64 = 2_000;
const STEPS_PER_BYTE: u64 = 4;

/// Stack of the thread that renders, and what it has for each byte of the template. The parser calls
/// itself for each operator of `1+1+1` or `--x`, without a limit: up to 1 KiB for a byte.
const BASE_STACK: usize = 16 << 20;
const STACK_PER_BYTE: usize = 3 << 10;

/// A message of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Message<'m> {
    /// `system`, `user` or `assistant`.
    pub role: &'m str,
    /// The text.
    pub content: &'m str,
}

/// The template of a `tokenizer_config.json`: one, or the one named `default` of several. An error is
/// what the key holds instead.
pub(super) fn of_config(config: &Value) -> Result<Option<String>, &Value> {
    let Some(found) = config.get("chat_template").filter(|v| !v.is_null()) else { return Ok(None) };
    let own = match found.as_array() {
        None => found.as_str(),
        Some(list) => {
            let default = list.iter().find(|t| t["name"] == "default");
            default.and_then(|t| t["template"].as_str())
        }
    };
    own.map(|own| Some(own.to_owned())).ok_or(found)
}

/// The special tokens that a template may print.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Specials {
    bos_token: Option<String>,
    eos_token: Option<String>,
    pad_token: Option<String>,
    unk_token: Option<String>,
}

impl Specials {
    /// Those of a `tokenizer_config.json`: `"</s>"` or `{"content": "</s>"}`.
    pub(super) fn of_config(config: &Value) -> Self {
        let special = |key: &str| {
            let found = config.get(key)?;
            let text = found.as_str().or_else(|| found.get("content")?.as_str());
            text.map(str::to_owned)
        };
        Self {
            bos_token: special("bos_token"),
            eos_token: special("eos_token"),
            pad_token: special("pad_token"),
            unk_token: special("unk_token"),
        }
    }
}

/// Bytes of stack of the thread that renders a template of `bytes`.
pub(super) fn stack(bytes: usize) -> usize {
    BASE_STACK + STACK_PER_BYTE * bytes
}

/// The text of a conversation. `date` is asked only by a template that prints the date.
pub(super) fn render(
    template: &str,
    specials: &Specials,
    messages: &[Message<'_>],
    date: impl Fn() -> Date + Send + Sync + 'static,
) -> Result<String, String> {
    if template.len() > TEMPLATE_LIMIT {
        return Err(format!("found {} bytes, expected at most {TEMPLATE_LIMIT}", template.len()));
    }
    let thread = thread::Builder::new().name("chat template".to_owned());
    let thread = thread.stack_size(stack(template.len()));
    thread::scope(|scope| {
        let work = || library("minijinja", || rendered(template, specials, messages, date));
        let thread = thread.spawn_scoped(scope, work).map_err(|e| format!("its thread: {e}"))?;
        thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
    })
}

/// [`render`], on a thread with enough stack.
fn rendered(
    template: &str,
    specials: &Specials,
    messages: &[Message<'_>],
    date: impl Fn() -> Date + Send + Sync + 'static,
) -> Result<String, String> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|e| e.to_string())?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    let of_message = |m: &Message<'_>| STEPS_PER_MESSAGE + STEPS_PER_BYTE * m.content.len() as u64;
    let steps = messages.iter().map(of_message).fold(BASE_STEPS, u64::saturating_add);
    environment.set_fuel(Some(steps));
    let wrong = |message: String| Error::new(ErrorKind::InvalidOperation, message);
    let raise = move |message: String| -> Result<String, Error> { Err(wrong(message)) };
    environment.add_function("raise_exception", raise);
    let now = move |format: String| date().strftime(&format).map_err(wrong);
    environment.add_function("strftime_now", now);
    let messages: Vec<_> =
        messages.iter().map(|m| context! { role => m.role, content => m.content }).collect();
    let Specials { bos_token, eos_token, pad_token, unk_token } = specials;
    let context = context! {
        messages,
        add_generation_prompt => true,
        bos_token,
        eos_token,
        pad_token,
        unk_token,
    };
    environment.render_named_str("the template", template, context).map_err(|e| match e.kind() {
        ErrorKind::OutOfFuel => {
            format!("found more than {steps} steps, the limit for these messages")
        }
        _ => e.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const USER: Message<'_> = Message { role: "user", content: "Hi there " };

    #[test]
    fn a_template_sees_messages_special_tokens_and_python_methods() {
        let template = "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n\
            [INST] {{ m['content'].strip() }} [/INST]\n  {% endif %}\n{% endfor %}\
            {% if add_generation_prompt %}>{% endif %}";
        let config = json!({"bos_token": {"content": "<s>"}});
        let specials = Specials::of_config(&config);
        let text = render(template, &specials, &[USER], Date::today).unwrap();
        assert_eq!(text, "<s>[INST] Hi there [/INST]\n>");
    }

    #[test]
    fn a_template_that_raises_an_exception_is_an_error() {
        let template = "{{ raise_exception('roles must alternate') }}";
        let error = failure(template);
        assert!(error.contains("roles must alternate"), "{error}");
    }

    fn failure(template: &str) -> String {
        render(template, &Specials::default(), &[USER], Date::today).unwrap_err()
    }

    #[test]
    fn loops_and_texts_without_end_are_refused() {
        let range = |body: &str| format!("{{% for i in range(99999) %}}{body}{{% endfor %}}");
        let doubled = "{% set n = namespace(x='abcdefgh') %}{% for i in range(60) %}\
            {% set n.x = n.x ~ n.x %}{% endfor %}";
        for template in [&range(&range("")), &range(&range("long text")), doubled] {
            let error = failure(template);
            assert!(error.contains("found more than 202036 steps"), "{error}");
        }
        // A long conversation has more steps.
        let content = "word ".repeat(400_000);
        let message = Message { role: "user", content: &content };
        let template = "{% for m in messages %}{{ '[' ~ m.content.strip() ~ ']' }}{% endfor %}";
        let text = render(template, &Specials::default(), &[message], Date::today).unwrap();
        assert_eq!(text.len(), content.len() + 1);
    }

    #[test]
    fn a_template_of_one_chain_of_operators_does_not_overflow_the_stack() {
        let whole = |begin: &str, part: &str, end: &str| {
            let room = TEMPLATE_LIMIT - begin.len() - end.len();
            format!("{begin}{}{end}", part.repeat(room / part.len()))
        };
        for (begin, part, end) in [
            ("{{ ", "-", "1 }}"),
            ("{{ 1", "|e", " }}"),
            ("{{ a", "()", " }}"),
            ("{{ 1", "+1", " }}"),
            ("{{ ", "(", " }}"),
        ] {
            // Text or an error, but no overflow, which would end the process.
            let _ = render(&whole(begin, part, end), &Specials::default(), &[USER], Date::today);
        }
        let long = "x".repeat(TEMPLATE_LIMIT + 1);
        let error = failure(&long);
        assert!(error.contains("131073 bytes, expected at most 131072"), "{error}");
    }

    #[test]
    fn a_template_may_ask_for_the_date_and_leave_loops() {
        let date = || "2026-02-07".parse().unwrap();
        let template = "{{ strftime_now('%d %B %Y') }}{% for i in range(9) %}{{ i }}\
            {% if i == 2 %}{% break %}{% endif %}{% endfor %}";
        assert_eq!(
            render(template, &Specials::default(), &[USER], date).unwrap(),
            "07 February 2026012"
        );
        let error = failure("{{ strftime_now('%Q') }}");
        assert!(error.contains("strftime_now") && error.contains("%Q"), "{error}");
    }

    #[test]
    fn of_several_templates_the_default_is_taken() {
        let one = |name: &str| json!({"name": name, "template": format!("of {name}")});
        let config = json!({"chat_template": [one("tool_use"), one("default")]});
        assert_eq!(of_config(&config), Ok(Some("of default".to_owned())));
        assert_eq!(of_config(&json!({"chat_template": "own"})), Ok(Some("own".to_owned())));
        for none in [json!(null), json!({}), json!({"chat_template": null})] {
            assert_eq!(of_config(&none), Ok(None));
        }
        for wrong in [json!(5), json!({"a": 1}), json!([one("tool_use")]), json!([])] {
            assert_eq!(of_config(&json!({"chat_template": wrong})), Err(&wrong));
        }
    }
}
