//! Which configs have which form: the fewest names and flags that tell the forms apart.

use std::fmt;

use super::sample::Sample;

/// The most facts that one form may depend on.
const MOST_FACTS: usize = 3;

/// Under which configs something holds: one of the alternatives, each a list of keys with the values
/// that they may have. No condition at all means always.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct When {
    /// The alternatives.
    pub any_of: Vec<Vec<(String, Vec<String>)>>,
}

impl When {
    /// Whether it holds under every config.
    pub fn is_always(&self) -> bool {
        self.any_of.is_empty() || self.any_of.iter().any(Vec::is_empty)
    }

    /// Whether it holds under a sample.
    pub(super) fn holds(&self, sample: &Sample) -> bool {
        let all = |conditions: &Vec<(String, Vec<String>)>| {
            conditions.iter().all(|(fact, values)| values.iter().any(|v| v == sample.fact(fact)))
        };
        self.is_always() || self.any_of.iter().any(all)
    }
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_always() {
            return f.write_str("always");
        }
        for (i, conditions) in self.any_of.iter().enumerate() {
            f.write_str(if i > 0 { "; or " } else { "" })?;
            for (j, (fact, values)) in conditions.iter().enumerate() {
                f.write_str(if j > 0 { ", " } else { "" })?;
                write!(f, "{fact} {}", values.join(" or "))?;
            }
        }
        Ok(())
    }
}

/// The forms of something, with the samples that have each: `form` gives the one form of a group, or
/// `None` where the group has several.
///
/// Nothing is returned where no few facts tell the forms apart.
pub(super) fn forms<F: PartialEq>(
    samples: &[Sample],
    form: impl Fn(&[usize]) -> Option<F>,
) -> Vec<(When, F)> {
    let facts = fact_names(samples);
    for count in 0..=MOST_FACTS {
        for chosen in subsets(facts.len(), count) {
            let names: Vec<&str> = chosen.iter().map(|&i| facts[i].as_str()).collect();
            if let Some(found) = by_facts(samples, &names, &form) {
                return found;
            }
        }
    }
    Vec::new()
}

/// Facts with more than one value, in the order in which samples state them.
fn fact_names(samples: &[Sample]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for (name, _) in samples.iter().flat_map(|sample| &sample.facts) {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    names.retain(|name| samples.iter().any(|s| s.fact(name) != samples[0].fact(name)));
    names
}

/// All sets of `count` numbers below `len`.
fn subsets(len: usize, count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let with_last = |set: Vec<usize>| {
        let from = set.last().map_or(0, |&last| last + 1);
        (from..len).map(move |i| [&set[..], &[i]].concat())
    };
    subsets(len, count - 1).into_iter().flat_map(with_last).collect()
}

/// Values of the chosen facts, and the samples that have them.
type Group<'s> = (Vec<&'s str>, Vec<usize>);

fn by_facts<F: PartialEq>(
    samples: &[Sample],
    names: &[&str],
    form: impl Fn(&[usize]) -> Option<F>,
) -> Option<Vec<(When, F)>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for (i, sample) in samples.iter().enumerate() {
        let values: Vec<&str> = names.iter().map(|name| sample.fact(name)).collect();
        match groups.iter_mut().find(|(known, _)| *known == values) {
            Some((_, members)) => members.push(i),
            None => groups.push((values, vec![i])),
        }
    }
    for (_, members) in &groups {
        form(members)?;
    }
    let observed: Vec<Vec<&str>> = groups.iter().map(|(values, _)| values.clone()).collect();
    // Groups that one form fits are one class.
    let mut classes: Vec<(Vec<Vec<&str>>, Vec<usize>)> = Vec::new();
    for (values, members) in groups {
        let joined = classes.iter_mut().find_map(|(all, known)| {
            let together = [&known[..], &members[..]].concat();
            form(&together).is_some().then_some((all, known, together))
        });
        match joined {
            Some((all, known, together)) => {
                all.push(values);
                *known = together;
            }
            None => classes.push((vec![values], members)),
        }
    }
    classes
        .into_iter()
        .map(|(values, members)| Some((condition(names, &values, &observed), form(&members)?)))
        .collect()
}

/// The values that each fact may have.
type Product<'s> = Vec<Vec<&'s str>>;

/// The shortest condition that holds for `class` and for no other of the observed values.
fn condition(names: &[&str], class: &[Vec<&str>], observed: &[Vec<&str>]) -> When {
    let inside = |product: &Product<'_>, values: &Vec<&str>| {
        product.iter().zip(values).all(|(allowed, value)| allowed.contains(value))
    };
    let allowed = |product: &Product<'_>| {
        observed.iter().all(|values| !inside(product, values) || class.contains(values))
    };
    let mut products: Vec<Product<'_>> = Vec::new();
    for values in class {
        if products.iter().any(|product| inside(product, values)) {
            continue;
        }
        let single: Product<'_> = values.iter().map(|value| vec![*value]).collect();
        let wider = products.iter().position(|product| allowed(&union(product, &single)));
        match wider {
            Some(at) => products[at] = union(&products[at], &single),
            None => products.push(single),
        }
    }
    // Whole products may fit together as well.
    let mut i = 0;
    while i < products.len() {
        let fitting =
            (i + 1..products.len()).find(|&j| allowed(&union(&products[i], &products[j])));
        match fitting {
            Some(j) => {
                products[i] = union(&products[i], &products[j]);
                products.remove(j);
            }
            None => i += 1,
        }
    }
    let all_of = |at: usize| {
        let mut all: Vec<&str> = Vec::new();
        for values in observed {
            if !all.contains(&values[at]) {
                all.push(values[at]);
            }
        }
        all
    };
    let any_of = products.into_iter().map(|mut product| {
        let mut conditions = Vec::new();
        for at in 0..names.len() {
            let mut wider = product.clone();
            wider[at] = all_of(at);
            if allowed(&wider) {
                product = wider;
            }
        }
        for (at, values) in product.iter().enumerate() {
            if values.len() < all_of(at).len() {
                let values = values.iter().map(|value| (*value).to_owned()).collect();
                conditions.push((names[at].to_owned(), values));
            }
        }
        conditions
    });
    When { any_of: any_of.collect() }
}

fn union<'s>(a: &Product<'s>, b: &Product<'s>) -> Product<'s> {
    let join = |(a, b): (&Vec<&'s str>, &Vec<&'s str>)| {
        let more = b.iter().filter(|value| !a.contains(value));
        a.iter().chain(more).copied().collect()
    };
    a.iter().zip(b).map(join).collect()
}
