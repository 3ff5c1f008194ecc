// The data behind the page: the last state, and rates computed by comparing it with earlier ones.

const WINDOW_MS = 8_000;
const SPARK_MAX = 60;
const LATE_MS = 2_000;
const SLOW_FACTOR = 1.3;

export const SEVERITY = { dead: 0, suspect: 1, stalled: 2, joining: 3, waiting: 4, active: 5, left: 6 };

// Whether a member has left or died, so that it has no rates.
export function gone(member) {
  return member.state === "left" || member.state === "dead";
}

export class Model {
  constructor() {
    this.clear();
  }

  clear() {
    this.state = null;
    this.members = [];
    this.past = [];
    this.sparks = new Map();
  }

  // `history`: member -> list of beat ages, oldest first.
  setHistory(history) {
    for (const [name, ages] of Object.entries(history)) this.sparks.set(name, ages.slice(-SPARK_MAX));
    this.sparkAt = null;
  }

  update(state) {
    const columns = state.members;
    const restarted = this.state && (this.state.cluster_id !== state.cluster_id || this.state.epoch !== state.epoch);
    if (restarted || (this.state && this.state.generation !== state.generation)) this.past = [];
    this.state = state;
    this.members = columns.name.map((_, i) => Object.fromEntries(Object.keys(columns).map((key) => [key, columns[key][i]])));
    const byName = new Map(this.members.map((member) => [member.name, { ...member }]));
    const links = new Map(state.links.map(([from, to, kind, sent]) => [`${from}>${to}`, { from, to, kind, sent }]));
    this.past.push({ at: state.at_ms, members: byName, links });
    while (this.past.length > 2 && this.past[1].at < state.at_ms - WINDOW_MS) this.past.shift();
    this.#barriers();
    this.#rates();
    this.#spark(state.at_ms);
  }

  // For members at or missing from an open barrier, this is shown in place of their last operation.
  #barriers() {
    const byRank = new Map(this.ranked().map((member) => [member.rank, member]));
    for (const barrier of this.state.barriers) {
      if (barrier.generation !== this.state.generation) continue;
      for (const rank of barrier.arrived) if (byRank.has(rank)) byRank.get(rank).doing = `waits at barrier ${barrier.name}`;
      for (const rank of barrier.missing) if (byRank.has(rank)) byRank.get(rank).missing ||= barrier;
    }
    for (const member of this.members) {
      if (member.missing) member.doing = `missing at barrier ${member.missing.name}; last seen in ${member.activity || "nothing yet"}`;
      member.doing ||= member.activity;
    }
  }

  #rates() {
    const before = this.past[0];
    const seconds = (this.state.at_ms - before.at) / 1000;
    for (const member of this.members) {
      const earlier = before.members.get(member.name);
      const known = seconds > 0.2 && earlier && member.step >= earlier.step && !gone(member);
      const steps = known ? member.step - earlier.step : 0;
      const operationShare = known ? Math.min(1, Math.max(0, (member.operation_ms - earlier.operation_ms) / 1000 / seconds)) : null;
      member.stepsPerSecond = known ? steps / seconds : null;
      member.operationShare = operationShare;
      member.stepMs = steps > 0 ? (seconds * 1000) / steps : null;
      member.ownMs = steps > 0 ? member.stepMs * (1 - operationShare) : null;
      member.training = stepTimes(member.training, earlier && earlier.training);
      const barrierMs = member.missing && member.missing.age_ms > LATE_MS ? member.missing.age_ms : 0;
      member.lateMs = Math.max(barrierMs, member.behind_ms);
    }
    const there = new Set(this.ranked().filter((member) => !gone(member)).map((member) => member.rank));
    this.links = [...this.past.at(-1).links.entries()].map(([key, link]) => {
      // A link may be told of long after it began: by a coordinator that was started again, or as one of the busiest of many.
      const first = this.past.find((state) => state.links.has(key));
      const since = (this.state.at_ms - first.at) / 1000;
      const known = since > 0.2 && there.has(link.from);
      return { ...link, bytesPerSecond: known ? Math.max(0, link.sent - first.links.get(key).sent) / since : null };
    });
  }

  #spark(at) {
    if (this.sparkAt && at - this.sparkAt < 950) return;
    this.sparkAt = at;
    for (const member of this.members) {
      const ages = this.sparks.get(member.name) || [];
      ages.push(gone(member) ? -1 : member.beat_age_ms);
      this.sparks.set(member.name, ages.slice(-SPARK_MAX));
    }
  }

  // The members with a rank, in rank order.
  ranked() {
    return this.members.filter((member) => member.rank >= 0);
  }

  // The members that have a rank or may get one, without former members of earlier generations.
  present() {
    return this.members.filter((member) => member.rank >= 0 || !gone(member));
  }

  // The members with known step times, the one with the longest time between operations first: the others wait for it.
  byOwnTime() {
    return this.ranked().filter((member) => member.ownMs !== null).sort((a, b) => b.ownMs - a.ownMs);
  }

  // The members that train, the one with the longest computing time per step first; of a job that is over, those that did.
  byComputeTime() {
    const trained = this.ranked().filter((member) => member.training);
    const there = trained.filter((member) => !gone(member));
    return (there.length ? there : trained).sort((a, b) => b.training.computeMs - a.training.computeMs);
  }

  // Describes a rank that is slower than the others although it works; empty if there is none.
  slowest() {
    const training = this.byComputeTime().filter((member) => !gone(member));
    if (training.length > 1) return slowestOf(training, (member) => member.training.computeMs, "of computing in a training step");
    return slowestOf(this.byOwnTime(), (member) => member.ownMs, "between two operations");
  }

  newest() {
    return this.state.generations.at(-1) || null;
  }

  // The number of ranks. A rank whose place is just being taken has no member.
  size() {
    return this.newest()?.size ?? 0;
  }

  // The state of the job in a sentence: [good | warn | bad | idle, headline, details].
  summary() {
    const { level, title, details } = this.state.headline;
    const slowest = level === "good" ? this.slowest() : "";
    return [level, title, [...details, slowest].filter(Boolean).join(" · ")];
  }
}

// Times per training step: over the steps since `before`, or over all steps if none ended since; null before the first.
function stepTimes(now, before) {
  if (!now) return null;
  const since = before && before[0] < now[0] ? now.map((value, i) => value - before[i]) : now;
  const [steps, computeMs, exposedMs, hiddenMs] = since;
  return { steps: now[0], computeMs: computeMs / steps, exposedMs: exposedMs / steps, hiddenMs: hiddenMs / steps };
}

// `order`: the members, the slowest first.
function slowestOf(order, ms, of) {
  const typical = order[Math.floor(order.length / 2)];
  if (order.length < 2 || ms(order[0]) < SLOW_FACTOR * ms(typical) || ms(order[0]) - ms(typical) < 1) return "";
  const [own, others] = [ms(order[0]), ms(typical)].map((value) => (value < 10 ? value.toFixed(1) : Math.round(value)));
  return `The slowest is rank ${order[0].rank}: ${own} ms ${of}, where others need ${others} ms`;
}
