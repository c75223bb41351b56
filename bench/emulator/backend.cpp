// A c10d backend that is rank `rank` of `size` ranks in one process.
//
// Every rank is taken to hold this rank's tensors: shapes and bytes are those of the real
// collective, values are right only if all ranks compute the same. Collectives that are not
// here raise, as c10d::Backend does.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>

#include "network.h"

namespace {

using c10d::Work;
using TensorList = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;
using NetworkPtr = std::shared_ptr<Network>;

int64_t total_bytes(const TensorList& tensors) {
  int64_t sum = 0;
  for (const auto& t : tensors) sum += static_cast<int64_t>(t.nbytes());
  return sum;
}

// Every float of it is NaN then, every integer -1.
void fill_with_ones(const at::Tensor& tensor) {
  memset(tensor.mutable_data_ptr(), 0xFF, tensor.nbytes());
}

// Holds what it reads and writes until somebody waits, as real backends do.
class EmulatedWork : public Work {
 public:
  EmulatedWork(NetworkPtr network, int64_t index, TensorList outputs, TensorList inputs)
      : network_(std::move(network)),
        index_(index),
        outputs_(std::move(outputs)),
        inputs_(std::move(inputs)) {}

  // Hides the outputs until somebody waits.
  void poison() {
    for (const auto& output : outputs_) {
      hidden_.push_back(output.clone());
      fill_with_ones(output);
    }
  }

  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    if (waited_) return true;
    waited_ = true;
    Network::Paused paused(*network_);
    network_->wait(index_);
    at::AutoDispatchBelowAutograd below;
    for (size_t i = 0; i < hidden_.size(); i++) outputs_[i].copy_(hidden_[i]);
    outputs_.clear();
    inputs_.clear();
    hidden_.clear();
    return true;
  }
  void synchronize() override { wait(); }
  bool isCompleted() override { return waited_ || network_->has_ended(index_); }
  bool isSuccess() const override { return true; }

 private:
  NetworkPtr network_;
  int64_t index_;
  TensorList outputs_, inputs_, hidden_;
  bool waited_ = false;
};

class EmulatedBackend : public c10d::Backend {
 public:
  EmulatedBackend(int rank, int size, NetworkPtr network, int64_t link)
      : Backend(rank, size), network_(std::move(network)), lane_(network_->add_lane(link)) {}

  const std::string getBackendName() const override { return "emulated"; }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& = c10d::AllgatherOptions()) override {
    return send("all_gather", ring(output.nbytes()), {output}, {input}, [&] {
      for (const auto& row : output.view({size_, -1}).unbind(0)) copy(row, input);
    });
  }

  WorkPtr allgather(std::vector<TensorList>& outputs, TensorList& inputs,
                    const c10d::AllgatherOptions& = c10d::AllgatherOptions()) override {
    TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1, "emulated: one tensor at a time");
    return send("all_gather", ring(total_bytes(outputs[0])), outputs[0], inputs, [&] {
      for (const auto& output : outputs[0]) copy(output, inputs[0]);
    });
  }

  // What functional collectives, and so traced ones, call: one collective for all tensors.
  WorkPtr allgather_into_tensor_coalesced(
      TensorList& outputs, TensorList& inputs,
      const c10d::AllgatherOptions& = c10d::AllgatherOptions()) override {
    return send("all_gather", ring(total_bytes(outputs)), outputs, inputs, [&] {
      for (size_t i = 0; i < outputs.size(); i++) {
        for (const auto& row : outputs[i].view({size_, -1}).unbind(0)) copy(row, inputs.at(i));
      }
    });
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      TensorList& outputs, TensorList& inputs,
      const c10d::ReduceScatterOptions& options = c10d::ReduceScatterOptions()) override {
    double factor = times(options.reduceOp);
    return send("reduce_scatter", ring(total_bytes(inputs)), outputs, inputs, [&] {
      for (size_t i = 0; i < outputs.size(); i++) {
        copy(outputs[i], inputs.at(i).view({size_, -1})[rank_]);
        if (factor != 1) outputs[i].mul_(factor);
      }
    });
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options = c10d::ReduceScatterOptions()) override {
    double factor = times(options.reduceOp);
    return send("reduce_scatter", ring(input.nbytes()), {output}, {input}, [&] {
      copy(output, input.view({size_, -1})[rank_]);
      if (factor != 1) output.mul_(factor);
    });
  }

  WorkPtr allreduce(TensorList& tensors,
                    const c10d::AllreduceOptions& options = c10d::AllreduceOptions()) override {
    double factor = times(options.reduceOp);
    return send("all_reduce", 2 * ring(total_bytes(tensors)), tensors, {}, [&] {
      if (factor == 1) return;
      for (auto& tensor : tensors) tensor.mul_(static_cast<int64_t>(factor));
    });
  }

  WorkPtr broadcast(TensorList& tensors,
                    const c10d::BroadcastOptions& = c10d::BroadcastOptions()) override {
    return send("broadcast", total_bytes(tensors), tensors, {}, [] {});
  }

  // Rank 0 sends each rank its part.
  WorkPtr scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                  const c10d::ScatterOptions& options = c10d::ScatterOptions()) override {
    TORCH_CHECK(options.rootRank == 0 && rank_ == 0 && inputs.size() == 1 && outputs.size() == 1,
                "emulated: one tensor, from rank 0");
    return send("scatter", ring(total_bytes(inputs[0])), outputs, inputs[0],
                [&] { copy(outputs[0], inputs[0].at(0)); });
  }

  WorkPtr barrier(const c10d::BarrierOptions& = c10d::BarrierOptions()) override {
    return send("barrier", 0, {}, {}, [] {});
  }

 private:
  // The outputs have their values at once; what waits is the clock, and the outputs if poisoned.
  WorkPtr send(const char* kind, int64_t link_bytes, TensorList outputs, TensorList inputs,
               const std::function<void()>& fill) {
    Network::Paused paused(*network_);
    at::AutoDispatchBelowAutograd below;
    fill();
    auto index = network_->issue(kind, lane_, link_bytes);
    auto work = c10::make_intrusive<EmulatedWork>(network_, index, std::move(outputs),
                                                  std::move(inputs));
    if (network_->poison) work->poison();
    return work;
  }

  // Bytes that one rank sends when `full_bytes` go around a ring: (size - 1) / size of them.
  int64_t ring(int64_t full_bytes) const { return full_bytes * (size_ - 1) / size_; }

  // What a reduction of equal values multiplies them by.
  double times(const c10d::ReduceOp& op) const {
    if (op == c10d::ReduceOp::SUM) return size_;
    TORCH_CHECK(op == c10d::ReduceOp::AVG || op == c10d::ReduceOp::MIN ||
                    op == c10d::ReduceOp::MAX,
                "emulated: this reduction is not supported");
    return 1;
  }

  // An input may be a part of the output.
  static void copy(const at::Tensor& output, const at::Tensor& input) {
    if (output.const_data_ptr() == input.const_data_ptr()) return;
    output.copy_(input.view(output.sizes()));
  }

  NetworkPtr network_;
  int64_t lane_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch.distributed");
  py::class_<Transfer>(m, "Transfer")
      .def_readonly("kind", &Transfer::kind)
      .def_readonly("lane", &Transfer::lane)
      .def_readonly("link_bytes", &Transfer::link_bytes)
      .def_readonly("issue_us", &Transfer::issue_us)
      .def_readonly("start_us", &Transfer::start_us)
      .def_readonly("end_us", &Transfer::end_us)
      .def_readonly("waited_us", &Transfer::waited_us);
  py::class_<Network, NetworkPtr>(m, "Network")
      .def(py::init<double, double, bool>(), py::kw_only(), py::arg("bytes_per_us"),
           py::arg("alpha_us"), py::arg("cpu_clock"))
      .def_readwrite("poison", &Network::poison)
      .def("set_link", &Network::set_link, py::arg("link"), py::kw_only(),
           py::arg("bytes_per_us"), py::arg("alpha_us"))
      .def("now_us", &Network::now_us)
      .def("compute_us", &Network::compute_us)
      .def("set_speed", &Network::set_speed)
      .def("in_flight", &Network::in_flight)
      .def("clear", &Network::clear)
      .def("timeline", &Network::timeline);
  py::class_<EmulatedBackend, c10d::Backend, c10::intrusive_ptr<EmulatedBackend>>(
      m, "EmulatedBackend")
      .def(py::init([](int rank, int size, NetworkPtr network, int64_t link) {
             return c10::make_intrusive<EmulatedBackend>(rank, size, std::move(network), link);
           }),
           py::arg("rank"), py::arg("size"), py::arg("network"),
           py::arg("link") = Network::kBetween);
}
