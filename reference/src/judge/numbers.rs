//! Formatting of numbers in texts.

/// A factor with six significant digits, or more if it would otherwise round to 1.
pub(super) fn number(x: f64) -> String {
    let short = |digits: usize| {
        let text = format!("{x:.digits$}");
        let text = if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text
        };
        (text != "1" || x == 1.0).then_some(text)
    };
    if x != 0.0 && !(1e-3..1e7).contains(&x.abs()) {
        return format!("{x:.5e}");
    }
    short(6).or_else(|| short(12)).unwrap_or_else(|| format!("1{:+.3e}", x - 1.0))
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn no_number_looks_like_another() {
        assert_eq!(number(2.0), "2");
        assert_eq!(number(1.003), "1.003");
        assert_eq!(number(3.0e-9), "3.00000e-9");
        assert_eq!(number(-0.25), "-0.25");
        assert_eq!(number(1.000_000_04), "1.00000004");
        assert_eq!(number(1.0 + f64::EPSILON), "1+2.220e-16");
    }
}
