"""Speculative decoding written again as plain loops, to compare recorded runs with: no caches, the whole history
recomputed for every token. Nothing of it uses the package; `run` and `Twins` are what is compared."""

from dataclasses import dataclass, field

import torch

from compressor.decode import Law, Runner
from compressor.proposers.base import Context
from compressor.proposers.nodes import NodeCache


@dataclass
class Record:
    token_ids: list = field(default_factory=list)
    proposals: list = field(default_factory=list)
    parents: list = field(default_factory=list)
    accepted_per_position: list = field(default_factory=list)

    @classmethod
    def of(cls, output):
        return cls(output.token_ids, output.proposals, output.parents, output.accepted_per_position)


def pick(weights, generator):
    """The token where the cumulative weight passes a uniform share of the total."""
    share = torch.rand((), generator=generator, dtype=torch.float64) * weights.sum()
    return int((weights.cumsum(0) <= share).sum())


def uniform(generator):
    return float(torch.rand((), generator=generator, dtype=torch.float64))


def softmax(logits, temperature):
    return (logits.double() / temperature).softmax(-1)


def draft_tree(draft_logits, history, widths, temperature, generator):
    """Nodes as (token, parent, law), level by level; a parent of -1 is the end of the history."""
    nodes, level = [], [-1]
    for width in widths:
        below = []
        for parent in level:
            logits = draft_logits(history, path_to(nodes, parent))
            if temperature == 0:
                tokens, law = logits.topk(min(width, int((logits > -torch.inf).sum()))).indices.tolist(), None
            else:
                law, tokens = softmax(logits, temperature), []
                left = law.clone()
                while len(tokens) < width and (left > 0).any():
                    tokens.append(pick(left, generator))
                    left[tokens[-1]] = 0
            for token in tokens:
                nodes.append((token, parent, law))
                below.append(len(nodes) - 1)
        level = below
    return nodes


def path_to(nodes, node):
    path = []
    while node != -1:
        token, node, _ = nodes[node]
        path.insert(0, token)
    return path


def verify(target_logits, history, nodes, temperature, generator):
    """(accepted tokens, next token)."""
    node, path = -1, []
    while True:
        logits = target_logits(history + path)
        children = [index for index, (_, parent, _) in enumerate(nodes) if parent == node]
        if temperature == 0:
            best = int(logits.argmax())
            found = [child for child in children if nodes[child][0] == best]
            if not found:
                return path, best
            node, path = found[0], [*path, best]
            continue
        p, stopped = softmax(logits, temperature), True
        q = nodes[children[0]][2].clone() if children else None
        for child in children:
            token = nodes[child][0]
            if uniform(generator) < p[token] / q[token]:
                node, path, stopped = child, [*path, token], False
                break
            p = (p - q).clamp(min=0)
            p = p / p.sum()
            if child != children[-1]:
                q[token] = 0
                q = q / q.sum()
        if stopped:
            return path, pick(p, generator)


def speculate(target_logits, draft_logits, prompt, new, k, branching=None, temperature=0.0, seed=0):
    """What generating `new` tokens after `prompt` records. `target_logits(tokens)` [V] are those after the tokens;
    `draft_logits(history, path)` [V] those of the proposer after the history and what it drafted behind it."""
    generator, record, history = torch.Generator().manual_seed(seed), Record(), list(prompt)
    widths = ((1,) * k if branching is None else branching)[:k]
    while len(history) < len(prompt) + new:
        first = len(history) == len(prompt)
        nodes = [] if first else draft_tree(draft_logits, history, widths, temperature, generator)
        accepted, token = verify(target_logits, history, nodes, temperature, generator)
        depth = max((len(path_to(nodes, node)) for node in range(len(nodes))), default=0)
        record.proposals.append(tuple(token for token, _, _ in nodes))
        record.parents.append(None if first or branching is None else tuple(parent for _, parent, _ in nodes))
        record.accepted_per_position.append(tuple(int(level < len(accepted)) for level in range(depth)))
        history += [*accepted, token]
    record.token_ids = history[len(prompt) : len(prompt) + new]
    return record


def run(decoder, proposer, prompt, new, k, temperature=0.0, seed=0):
    """What the package records for the same."""
    return Record.of(Runner(decoder, proposer, k).generate(prompt, new, Law(temperature), seed, ()))


class Model:
    """A transformers model as the reference's target: every call reads all tokens."""

    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def states(self, tokens):
        """Residual stream after 0, 1, … layers [T, H] each; the last one after the final norm."""
        output = self.model.model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        return [state[0] for state in output.hidden_states]

    def before_norm(self, tokens):
        """Residual stream after the last layer [T, H]."""
        found = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda module, args: found.append(args[0][0]))
        self.states(tokens)
        hook.remove()
        return found[0]

    @torch.no_grad()
    def logits(self, tokens):
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def norm(x, weight, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x, theta):
    """Rotary embedding of x [T, heads, d], row t by t."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] / theta ** (torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(x, tensors, prefix, heads, kv_heads, theta=10000.0):
    """Causal attention of all rows x [T, in], from raw tensors."""

    def project(name):
        y = x @ tensors[f"{prefix}{name}.weight"].T
        return y + tensors[f"{prefix}{name}.bias"] if f"{prefix}{name}.bias" in tensors else y

    q, k, v = project("q_proj"), project("k_proj"), project("v_proj")
    size, count = q.shape[1] // heads, len(x)
    q, k, v = q.view(count, heads, size), k.view(count, kv_heads, size), v.view(count, kv_heads, size)
    q, k = turn(q, theta), turn(k, theta)
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    rows = []
    for t in range(count):
        weights = ((k[: t + 1] * q[t]).sum(-1) / size**0.5).softmax(0)  # [t + 1, heads]
        rows.append((weights[..., None] * v[: t + 1]).sum(0).flatten())
    return torch.stack(rows) @ tensors[f"{prefix}o_proj.weight"].T


def gated_mlp(x, tensors, prefix):
    gate, up, down = (tensors[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


class Twins:
    """A proposer whose sessions draft twice: themselves, and in a new session that is given the same history and all
    states at once. `worst` is the largest difference of their logits, as a share of the largest logit; `tried` another
    proposer for the first of the two."""

    def __init__(self, proposer, module, monkeypatch, tried=None):
        self.tried = tried or proposer
        self.proposer, self.features, self.worst, self.calls = proposer, proposer.features, 0.0, 0
        self.seen, original = [], module.grow

        def spy(context, branching, root, expand):
            self.seen.append(root)

            def noting(draft, nodes):
                self.seen.append(expand(draft, nodes))
                return self.seen[-1]

            return original(context, branching, root, noting)

        monkeypatch.setattr(module, "grow", spy)

    def session(self):
        return _Twin(self)


class _Twin:
    def __init__(self, twins):
        self.twins, self.old, self.features = twins, twins.tried.session(), None

    def propose(self, context):
        twins = self.twins
        if context.features is not None:
            parts = [context.features] if self.features is None else [self.features, context.features]
            self.features = torch.cat(parts)
        generator = torch.Generator().set_state(context.generator.get_state())
        twins.seen = []
        draft = self.old.propose(context)
        ours, twins.seen = twins.seen, []
        fresh = Context(context.history, context.k, context.law, generator, self.features, context.confidence)
        again = twins.proposer.session().propose(fresh)
        for one, other in zip(ours, twins.seen, strict=False):
            if one.shape == other.shape:
                finite = other > -torch.inf
                assert torch.equal(one > -torch.inf, finite)
                scale = max(1.0, float(other[finite].abs().max()))
                twins.worst = max(twins.worst, float((one - other)[finite].abs().max()) / scale)
        twins.calls += 1
        if twins.worst < 1e-5:
            assert (draft.tokens, draft.parents) == (again.tokens, again.parents)
        return draft


def read_in_pieces(monkeypatch, size):
    """From here on a pass reads at most `size` tokens of a text. Returns the numbers of tokens that the proposer reads
    at a time, a list that fills."""
    for module in ("decode.batch", "proposers.draft_model", "proposers.recurrent"):
        monkeypatch.setattr(f"compressor.{module}.CHUNK", size)
    pieces, text = [], NodeCache.text
    monkeypatch.setattr(NodeCache, "text", lambda self, count: pieces.append(count) or text(self, count))
    return pieces
