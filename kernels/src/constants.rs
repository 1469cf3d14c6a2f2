//! Values of the sources' constants: `constexpr unsigned NAME = EXPRESSION;` and the enumerators of
//! `enum NAME : unsigned { ... };` outside of functions and structs, as the compiler computes them.
//!
//! Expressions consist of decimal numbers, names, `+ - * / % == != < <= > >= && || !`, parentheses and `?:`.

use std::{collections::HashMap, sync::LazyLock};

use crate::{PROBES, Parameter, SOURCES};

/// A constant that has no value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConstantError {
    /// Neither a parameter nor a constant of the source.
    Unknown {
        /// The source.
        source: String,
        /// The name.
        name: String,
    },
    /// Its expression cannot be evaluated: unsupported syntax, a division by zero, or a value
    /// outside of `u32`.
    Expression {
        /// The source.
        source: String,
        /// The constant.
        name: String,
    },
}

impl std::fmt::Display for ConstantError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unknown { source, name } => {
                write!(f, "`{source}`: {name} is neither a parameter nor a constant of the source")
            }
            Self::Expression { source, name } => {
                write!(f, "`{source}`: the constant {name} cannot be evaluated")
            }
        }
    }
}

impl std::error::Error for ConstantError {}

/// The value of constant `name` of a source under these parameters.
///
/// # Errors
/// [`ConstantError`]
pub fn constant(source: &str, name: &str, parameters: &[Parameter]) -> Result<u32, ConstantError> {
    static TABLES: LazyLock<HashMap<&'static str, Table>> = LazyLock::new(|| {
        SOURCES.iter().chain(PROBES.iter()).map(|s| (s.name, Table::new(s.text))).collect()
    });
    let unknown = || ConstantError::Unknown { source: source.into(), name: name.into() };
    let table = TABLES.get(source).ok_or_else(unknown)?;
    let mut scope = Scope { table, source, parameters, known: HashMap::new() };
    let value = scope.value(name)?;
    u32::try_from(value)
        .map_err(|_| ConstantError::Expression { source: source.into(), name: name.into() })
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Number(i64),
    Name(String),
    Operator(&'static str),
}

/// The longer ones first.
const OPERATORS: [&str; 18] = [
    "==", "!=", "<=", ">=", "&&", "||", "<", ">", "+", "-", "*", "/", "%", "!", "(", ")", "?", ":",
];

/// Constants of a source, as the tokens of their expressions; `None` if they cannot be split.
#[derive(Debug)]
struct Table(HashMap<String, Option<Vec<Token>>>);

impl Table {
    fn new(text: &str) -> Self {
        let mut table = HashMap::new();
        let mut lines = text.lines().map(|line| line.split("//").next().unwrap_or(""));
        while let Some(line) = lines.next() {
            let is_enum = line.starts_with("enum ");
            if !is_enum && !line.starts_with("constexpr unsigned ") {
                continue;
            }
            let mut statement = line.to_string();
            while !statement.contains(';') {
                let Some(line) = lines.next() else { break };
                statement.push(' ');
                statement += line;
            }
            let statement = statement.split(';').next().unwrap_or("");
            if is_enum {
                add_enumerators(&mut table, statement);
            } else if let Some((name, expression)) =
                statement.trim_start_matches("constexpr unsigned ").split_once('=')
            {
                table.insert(name.trim().to_string(), tokens(expression));
            }
        }
        Self(table)
    }
}

fn add_enumerators(table: &mut HashMap<String, Option<Vec<Token>>>, statement: &str) {
    let list = statement.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    for enumerator in list.map_or("", |(list, _)| list).split(',') {
        if let Some((name, value)) = enumerator.split_once('=') {
            table.insert(name.trim().to_string(), tokens(value));
        }
    }
}

fn tokens(text: &str) -> Option<Vec<Token>> {
    let (mut tokens, mut rest) = (Vec::new(), text.trim_start());
    while let Some(first) = rest.chars().next() {
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let length = if is_word(first) {
            let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            tokens.push(match first.is_ascii_digit() {
                true => Token::Number(rest[..length].trim_end_matches('u').parse().ok()?),
                false => Token::Name(rest[..length].to_string()),
            });
            length
        } else {
            let operator = OPERATORS.into_iter().find(|operator| rest.starts_with(operator))?;
            tokens.push(Token::Operator(operator));
            operator.len()
        };
        rest = rest[length..].trim_start();
    }
    Some(tokens)
}

/// Binary operators by precedence, the weakest first.
const LEVELS: [&[&str]; 6] =
    [&["||"], &["&&"], &["==", "!="], &["<", "<=", ">", ">="], &["+", "-"], &["*", "/", "%"]];

/// One evaluation: the values known under its parameters.
struct Scope<'t> {
    table: &'t Table,
    source: &'t str,
    parameters: &'t [Parameter],
    known: HashMap<&'t str, i64>,
}

impl<'t> Scope<'t> {
    fn value(&mut self, name: &str) -> Result<i64, ConstantError> {
        let parameter = self.parameters.iter().find(|parameter| parameter.0 == name);
        if let Some(&(_, value)) = parameter {
            return Ok(value.into());
        }
        if let Some(&value) = self.known.get(name) {
            return Ok(value);
        }
        let source = self.source;
        let failed = || ConstantError::Expression { source: source.into(), name: name.into() };
        let Some((key, tokens)) = self.table.0.get_key_value(name) else {
            return Err(ConstantError::Unknown { source: source.into(), name: name.into() });
        };
        let mut rest: &'t [Token] = tokens.as_deref().ok_or_else(failed)?;
        let value = self.ternary(&mut rest)?.filter(|_| rest.is_empty()).ok_or_else(failed)?;
        self.known.insert(key, value);
        Ok(value)
    }

    fn ternary(&mut self, rest: &mut &'t [Token]) -> Result<Option<i64>, ConstantError> {
        let condition = self.binary(rest, 0)?;
        if take(rest, &["?"]).is_none_or(|_| condition.is_none()) {
            return Ok(condition);
        }
        let then = self.ternary(rest)?;
        if take(rest, &[":"]).is_none() {
            return Ok(None);
        }
        let otherwise = self.ternary(rest)?;
        Ok(if condition == Some(0) { otherwise } else { then })
    }

    fn binary(
        &mut self,
        rest: &mut &'t [Token],
        level: usize,
    ) -> Result<Option<i64>, ConstantError> {
        let Some(operators) = LEVELS.get(level) else { return self.unary(rest) };
        let mut left = self.binary(rest, level + 1)?;
        while let Some(operator) = take(rest, operators) {
            let right = self.binary(rest, level + 1)?;
            left = left.zip(right).and_then(|(a, b)| apply(operator, a, b));
        }
        Ok(left)
    }

    fn unary(&mut self, rest: &mut &'t [Token]) -> Result<Option<i64>, ConstantError> {
        if take(rest, &["!"]).is_some() {
            return Ok(self.unary(rest)?.map(|value| i64::from(value == 0)));
        }
        if take(rest, &["("]).is_some() {
            let value = self.ternary(rest)?;
            return Ok(take(rest, &[")"]).and(value));
        }
        let Some((first, others)) = rest.split_first() else { return Ok(None) };
        *rest = others;
        match first {
            Token::Number(value) => Ok(Some(*value)),
            Token::Name(name) => self.value(name).map(Some),
            Token::Operator(_) => Ok(None),
        }
    }
}

/// Takes the next token where it is one of these operators.
fn take(rest: &mut &[Token], operators: &[&str]) -> Option<&'static str> {
    match rest.split_first() {
        Some((Token::Operator(operator), others)) if operators.contains(operator) => {
            *rest = others;
            Some(operator)
        }
        _ => None,
    }
}

fn apply(operator: &str, a: i64, b: i64) -> Option<i64> {
    match operator {
        "||" => Some((a != 0 || b != 0).into()),
        "&&" => Some((a != 0 && b != 0).into()),
        "==" => Some((a == b).into()),
        "!=" => Some((a != b).into()),
        "<" => Some((a < b).into()),
        "<=" => Some((a <= b).into()),
        ">" => Some((a > b).into()),
        ">=" => Some((a >= b).into()),
        "+" => a.checked_add(b),
        // Negative values would wrap around in `unsigned`.
        "-" => a.checked_sub(b).filter(|&difference| difference >= 0),
        "*" => a.checked_mul(b),
        "/" => a.checked_div(b),
        _ => a.checked_rem(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str, name: &str, parameters: &[Parameter]) -> Result<i64, ConstantError> {
        let table = Table::new(text);
        Scope { table: &table, source: "test", parameters, known: HashMap::new() }.value(name)
    }

    #[test]
    fn expressions_have_the_values_of_c() {
        let of = |expression: &str| {
            let text = format!("constexpr unsigned X =\n    {expression};  // a comment; more\n");
            value(&text, "X", &[("N", 5)]).ok()
        };
        assert_eq!(of("1 + 2 * 3 % 4 - 1"), Some(2));
        assert_eq!(of("(1 + 2) * 3u"), Some(9));
        assert_eq!(of("N / 2 * 2 == 4 && !(N > 5)"), Some(1));
        assert_eq!(of("N <= 4 ? 7 : N != 5 || N < 1 ? 8 : 9"), Some(9));
        assert_eq!(of("N >= 5 ? N == 4 ? 1 : 2 : 3"), Some(2));
        for wrong in ["1 / 0", "1 - 2", "1 +", "(1", "1 ? 2", "1 2", "0x10", "1 << 2", "ABSENT"] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn constants_refer_to_each_other_and_to_enumerators() {
        let text = "enum Kind : unsigned {\n    A = 0,  // first\n    B = 3,\n};\n\
                    constexpr unsigned TWICE = ONCE * 2;\nconstexpr unsigned ONCE = K == B ? 4 : 1;\n\
                    struct S {\n    static constexpr unsigned HIDDEN = 1;\n};\n";
        assert_eq!(value(text, "TWICE", &[("K", 3)]), Ok(8));
        assert_eq!(value(text, "TWICE", &[("K", 0)]), Ok(2));
        let unknown =
            |name: &str| ConstantError::Unknown { source: "test".into(), name: name.into() };
        assert_eq!(value(text, "TWICE", &[]), Err(unknown("K")));
        assert_eq!(value(text, "HIDDEN", &[]), Err(unknown("HIDDEN")));
        assert_eq!(
            unknown("K").to_string(),
            "`test`: K is neither a parameter nor a constant of the source"
        );
    }

    #[test]
    fn sources_state_their_constants() {
        assert_eq!(constant("marlin_gemm", "DIRECT_ENTRIES", &[]), Ok(32));
        assert_eq!(constant("marlin_gemm", "E4M3", &[]), Ok(4));
        assert_eq!(constant("matrix_limit", "SHARED_BYTES", &[("WGMMA", 1)]), Ok(40960));
        assert!(constant("absent", "X", &[]).is_err());
        // A stage of 64 k of 64 columns: 4-bit codes, one group of 16-bit scales, 8 rows of x.
        let stage = [("CODES", 0), ("SCALES", 0), ("GROUPS", 1), ("N_TILE", 64), ("M_TILES", 1)];
        assert_eq!(constant("marlin_gemm", "STAGE_BYTES", &stage), Ok(2048 + 128 + 1024));
    }
}
