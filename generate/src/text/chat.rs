//! Chat templates, as transformers renders them.

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, context};
use serde_json::Value;

/// A message of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'m> {
    /// `system`, `user` or `assistant`.
    pub role: &'m str,
    /// The text.
    pub content: &'m str,
}

/// The template of a `tokenizer_config.json`: one, or the one named `default` of several.
pub(super) fn of_config(config: &Value) -> Option<String> {
    let found = config.get("chat_template")?;
    let own = match found.as_array() {
        None => found.as_str(),
        Some(list) => {
            let default = list.iter().find(|t| t["name"] == "default");
            default.and_then(|t| t["template"].as_str())
        }
    };
    own.map(str::to_owned)
}

/// A special token's text, from `"</s>"` or `{"content": "</s>"}`.
fn special<'c>(config: &'c Value, key: &str) -> Option<&'c str> {
    let found = config.get(key)?;
    found.as_str().or_else(|| found.get("content")?.as_str())
}

/// The text of a conversation.
pub(super) fn render(
    template: &str,
    config: &Value,
    messages: &[Message<'_>],
) -> Result<String, Error> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    let raise = |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    };
    environment.add_function("raise_exception", raise);
    let messages: Vec<_> =
        messages.iter().map(|m| context! { role => m.role, content => m.content }).collect();
    let context = context! {
        messages,
        add_generation_prompt => true,
        bos_token => special(config, "bos_token"),
        eos_token => special(config, "eos_token"),
    };
    environment.render_str(template, context)
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
        let text = render(template, &config, &[USER]).unwrap();
        assert_eq!(text, "<s>[INST] Hi there [/INST]\n>");
    }

    #[test]
    fn a_template_that_raises_an_exception_is_an_error() {
        let template = "{{ raise_exception('roles must alternate') }}";
        let error = render(template, &Value::Null, &[USER]).unwrap_err();
        assert!(error.to_string().contains("roles must alternate"), "{error}");
    }

    #[test]
    fn of_several_templates_the_default_is_taken() {
        let one = |name: &str| json!({"name": name, "template": format!("of {name}")});
        let config = json!({"chat_template": [one("tool_use"), one("default")]});
        assert_eq!(of_config(&config).as_deref(), Some("of default"));
        assert_eq!(of_config(&json!({"chat_template": "own"})).as_deref(), Some("own"));
        assert_eq!(of_config(&Value::Null), None);
    }
}
