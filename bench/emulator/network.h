// A network on a virtual clock: what is sent when, and how long compute waits for it.
//
// In: transfers (bytes, lane) in the order of issue, and waits for them. Out: a timeline of every
// transfer. Afterwards the clock has moved only by compute and by waits.
//
// A lane is one process group; its transfers run one after the other, in order of issue. A transfer
// takes alpha_us, in which it needs no link, then its bytes at the rate of the link. Transfers of
// several lanes that are on the link at one time share it equally, so a second process group does
// not add bandwidth. Latency does not grow with the number of ranks, and a collective costs the
// host nothing but the call in Python.
//
// There may be two links: one between nodes, and one inside each node, with a rate and a latency of
// its own. A lane whose ranks are on several nodes uses the one between them alone: the hops of its
// ring inside the nodes are the faster ones, and take none of the other link's rate. A lane whose
// ranks are on one node uses the one inside alone.
#pragma once

#include <time.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

struct Transfer {
  std::string kind;
  int64_t lane;
  int64_t link_bytes;
  double issue_us;
  double start_us = -1;   // when its lane was free; -1: not yet
  double end_us = -1;     // -1: not yet
  double waited_us = 0;   // how long compute stood still for it
  double latency_left_us;
  double bytes_left;

  bool started() const { return start_us >= 0; }
  bool ended() const { return end_us >= 0; }
};

struct Link {
  double bytes_per_us = 1;
  double alpha_us = 0;
};

class Network {
 public:
  static constexpr int64_t kBetween = 0, kInside = 1;
  bool poison = false;

  // cpu_clock: compute takes the CPU time of the calling thread, so other processes on the machine
  // do not count. Without it compute takes what `compute_us` says.
  Network(double bytes_per_us, double alpha_us, bool cpu_clock)
      : cpu_clock_(cpu_clock), owner_(std::this_thread::get_id()) {
    set_link(kBetween, bytes_per_us, alpha_us);
    offset_us_ = -source_us();
  }

  void set_link(int64_t link, double bytes_per_us, double alpha_us) {
    if (!(bytes_per_us > 0) || !(alpha_us >= 0)) {
      throw std::invalid_argument("bytes_per_us must be positive, alpha_us not negative");
    }
    if (in_flight() > 0) throw std::logic_error("the link changes while transfers are in flight");
    if (link < 0 || link > static_cast<int64_t>(links_.size())) {
      throw std::invalid_argument("links are numbered from 0 on, without a gap");
    }
    if (link == static_cast<int64_t>(links_.size())) links_.emplace_back();
    links_[link] = {bytes_per_us, alpha_us};
  }

  int64_t add_lane(int64_t link) {
    links_.at(link);
    lanes_.emplace_back();
    link_of_.push_back(link);
    return static_cast<int64_t>(lanes_.size()) - 1;
  }

  double now_us() const { return (paused_ ? paused_at_us_ : source_us()) + offset_us_; }

  void compute_us(double us) { offset_us_ += us; }

  // From now on compute takes 1 / `speed` of its CPU time: as on a machine that is so much faster.
  void set_speed(double speed) {
    if (!(speed > 0)) throw std::invalid_argument("speed must be positive");
    double before_us = now_us();
    speed_ = speed;
    offset_us_ += before_us - now_us();
  }

  int64_t issue(const std::string& kind, int64_t lane, int64_t link_bytes) {
    advance(now_us());
    auto index = static_cast<int64_t>(timeline_.size());
    Transfer sent{kind, lane, link_bytes, now_us()};
    sent.latency_left_us = links_[link_of_.at(lane)].alpha_us;
    sent.bytes_left = static_cast<double>(link_bytes);
    timeline_.push_back(sent);
    lanes_.at(lane).push_back(index);
    return index;
  }

  // The clock jumps to the end of the transfer, unless that has passed.
  void wait(int64_t index) {
    advance(now_us());
    while (!timeline_.at(index).ended()) next_event(kForever);
    double behind_us = timeline_[index].end_us - now_us();
    if (behind_us <= 0) return;
    offset_us_ += behind_us;
    timeline_[index].waited_us += behind_us;
  }

  bool has_ended(int64_t index) {
    advance(now_us());
    return timeline_.at(index).ended();
  }

  int64_t in_flight() {
    advance(now_us());
    int64_t count = 0;
    for (const auto& lane : lanes_) count += static_cast<int64_t>(lane.size());
    return count;
  }

  // Forgets the past. Works of earlier transfers must not be waited for afterwards.
  void clear() {
    if (in_flight() > 0) throw std::logic_error("transfers are in flight");
    timeline_.clear();
  }

  const std::vector<Transfer>& timeline() const { return timeline_; }

  // While one of these lives, compute takes no time: for the emulator's own work.
  class Paused {
   public:
    explicit Paused(Network& network) : network_(network) {
      network_.paused_at_us_ = network_.source_us();
      network_.paused_ = true;
    }
    ~Paused() {
      network_.paused_ = false;
      network_.offset_us_ -= network_.source_us() - network_.paused_at_us_;
    }
    Paused(const Paused&) = delete;
    Paused& operator=(const Paused&) = delete;

   private:
    Network& network_;
  };

 private:
  static constexpr double kForever = std::numeric_limits<double>::infinity();

  double source_us() const {
    if (!cpu_clock_) return 0;
    if (std::this_thread::get_id() != owner_) {
      throw std::logic_error("the clock is the CPU time of one thread; another one called");
    }
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (1e6 * static_cast<double>(t.tv_sec) + 1e-3 * static_cast<double>(t.tv_nsec)) / speed_;
  }

  void advance(double to_us) {
    while (reached_us_ < to_us && next_event(to_us)) {
    }
    reached_us_ = std::max(reached_us_, to_us);
  }

  // Runs until the first head of a lane ends a phase (latency, or bytes), or until `limit_us`.
  // False if nothing is in flight.
  bool next_event(double limit_us) {
    std::vector<int64_t> heads;
    std::vector<int64_t> on_link(links_.size());
    for (const auto& lane : lanes_) {
      if (lane.empty()) continue;
      Transfer& head = timeline_[lane.front()];
      if (!head.started()) head.start_us = reached_us_;
      if (head.latency_left_us == 0) on_link[link_of_[head.lane]]++;
      heads.push_back(lane.front());
    }
    if (heads.empty()) return false;
    auto rate = [&](int64_t index) {
      auto link = link_of_[timeline_[index].lane];
      return links_[link].bytes_per_us / static_cast<double>(std::max<int64_t>(on_link[link], 1));
    };
    double step_us = limit_us - reached_us_;
    for (auto index : heads) step_us = std::min(step_us, phase_us(timeline_[index], rate(index)));
    for (auto index : heads) run(timeline_[index], step_us, rate(index));
    reached_us_ += step_us;
    for (auto& lane : lanes_) retire(lane);
    return true;
  }

  static double phase_us(const Transfer& t, double rate) {
    return t.latency_left_us > 0 ? t.latency_left_us : t.bytes_left / rate;
  }

  // The one that ends its phase ends it exactly, so rounding cannot keep it alive.
  static void run(Transfer& t, double step_us, double rate) {
    bool ends = phase_us(t, rate) <= step_us;
    if (t.latency_left_us > 0) {
      t.latency_left_us = ends ? 0 : t.latency_left_us - step_us;
    } else {
      t.bytes_left = ends ? 0 : t.bytes_left - step_us * rate;
    }
  }

  void retire(std::deque<int64_t>& lane) {
    if (lane.empty()) return;
    Transfer& head = timeline_[lane.front()];
    if (head.latency_left_us > 0 || head.bytes_left > 0) return;
    head.end_us = reached_us_;
    lane.pop_front();
  }

  bool cpu_clock_;
  std::thread::id owner_;
  double speed_ = 1;
  double offset_us_ = 0;     // waits and compute_us, less what was paused
  double reached_us_ = 0;    // the lanes are simulated up to here
  bool paused_ = false;
  double paused_at_us_ = 0;
  std::vector<Transfer> timeline_;
  std::vector<std::deque<int64_t>> lanes_;
  std::vector<int64_t> link_of_;  // by lane
  std::vector<Link> links_;
};
