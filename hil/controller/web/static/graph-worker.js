"use strict";
// Lay out a small graph with dagre, outside the page's main thread.
importScripts("/static/vendor/dagre.min.js");

onmessage = ({ data }) => {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ ranker: "tight-tree", nodesep: 24, ranksep: 44 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (let place = 0; place < data.count; place++) graph.setNode(place, { width: 150, height: 40 });
  for (const [first, last] of data.edges) graph.setEdge(first, last);
  dagre.layout(graph);
  const nodes = Array.from({ length: data.count }, (_, place) => graph.node(place));
  const bends = {};
  data.edges.forEach(([first, last], number) => {
    bends[number] = graph.edge(first, last).points.slice(1, -1).flatMap((point) => [point.x, point.y]);
  });
  const { width, height } = graph.graph();
  postMessage({ x: nodes.map((node) => node.x), y: nodes.map((node) => node.y), bends, width, height });
};
