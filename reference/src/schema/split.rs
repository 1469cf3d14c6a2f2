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
    facts: &Facts<'_>,
    form: impl Fn(&[usize]) -> Option<F>,
) -> Vec<(When, F)> {
    for count in 0..=MOST_FACTS {
        for chosen in subsets(facts.all.len(), count) {
            let chosen: Vec<&Fact<'_>> = chosen.iter().map(|&i| &facts.all[i]).collect();
            if let Some(found) = by_facts(facts.samples, &chosen, &form) {
                return found;
            }
        }
    }
    Vec::new()
}

/// Facts with more than one value, in the order in which samples state them.
pub(super) struct Facts<'s> {
    samples: usize,
    all: Vec<Fact<'s>>,
}

/// A fact of all samples.
struct Fact<'s> {
    name: &'s str,
    values: Vec<&'s str>,
    /// For each sample, the place of its value.
    of: Vec<usize>,
}

impl<'s> Facts<'s> {
    pub(super) fn new(samples: &'s [Sample]) -> Self {
        let mut names: Vec<&str> = Vec::new();
        for (name, _) in samples.iter().flat_map(|sample| &sample.facts) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        let facts = names.into_iter().map(|name| Fact::new(samples, name));
        Self { samples: samples.len(), all: facts.filter(|fact| fact.values.len() > 1).collect() }
    }
}

impl<'s> Fact<'s> {
    fn new(samples: &'s [Sample], name: &'s str) -> Self {
        let mut values = Vec::new();
        let mut place = |value| {
            values.iter().position(|v| *v == value).unwrap_or_else(|| {
                values.push(value);
                values.len() - 1
            })
        };
        let of = samples.iter().map(|sample| place(sample.fact(name))).collect();
        Self { name, values, of }
    }
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

fn by_facts<F: PartialEq>(
    samples: usize,
    facts: &[&Fact<'_>],
    form: impl Fn(&[usize]) -> Option<F>,
) -> Option<Vec<(When, F)>> {
    // Places of the facts' values, and the samples that have them.
    let mut groups: Vec<(Vec<usize>, Vec<usize>)> = Vec::new();
    for i in 0..samples {
        let values = || facts.iter().map(|fact| fact.of[i]);
        match groups.iter_mut().find(|(known, _)| known.iter().copied().eq(values())) {
            Some((_, members)) => members.push(i),
            None => groups.push((values().collect(), vec![i])),
        }
    }
    for (_, members) in &groups {
        form(members)?;
    }
    let names: Vec<&str> = facts.iter().map(|fact| fact.name).collect();
    let text = |places: &[usize]| -> Vec<&str> {
        facts.iter().zip(places).map(|(fact, &at)| fact.values[at]).collect()
    };
    let groups: Vec<_> = groups.into_iter().map(|(at, members)| (text(&at), members)).collect();
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
        .map(|(values, members)| Some((condition(&names, &values, &observed), form(&members)?)))
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
